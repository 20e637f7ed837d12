"""Tools behind HTTP: what is a result, what the model's mistake, and what a failure of the host."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import Response

from alignment.environments.documents import DocumentService
from alignment.environments.errors import InfrastructureFailure
from alignment.environments.tools.base import JsonObject
from alignment.environments.tools.http_tool import HttpTool
from alignment.environments.tools.limits import ToolLimits
from alignment.environments.tools.search_tool import SearchTool
from alignment.environments.tools.toolbox import Fault, Toolbox
from tests.support.scripted_engine import serve
from tests.support.tool_calls import EPISODE, assistant, call_one

PARAMETERS: JsonObject = {"type": "object", "properties": {"city": {"type": "string"}}}


@dataclass
class Service:
    """Answers each request with `response`, and keeps what it was sent."""

    response: Response = field(default_factory=lambda: Response("sunny"))
    requests: list[tuple[str, Any, dict[str, str]]] = field(default_factory=list)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        request = Request(scope, receive)
        self.requests.append((request.url.path, json.loads(await request.body()), dict(request.headers)))
        await self.response(scope, receive, send)


@pytest.fixture
def service() -> Service:
    return Service()


@pytest.fixture
def url(service: Service) -> Iterator[str]:
    with serve(service) as address:
        yield address


def weather(url: str, **options: Any) -> HttpTool:
    return HttpTool("weather", "The weather.", PARAMETERS, f"{url}/weather", **options)


async def test_arguments_are_posted_and_the_body_is_the_result(service: Service, url: str) -> None:
    tool = weather(url, headers={"authorization": "Bearer secret"})
    assert (await call_one(tool, {"city": "Rome"})).result.text == "sunny"
    [(path, body, headers)] = service.requests
    assert (path, body) == ("/weather", {"city": "Rome"})
    assert (headers["authorization"], headers["x-attune-episode"]) == ("Bearer secret", "ep-1")


@pytest.mark.parametrize("status", [400, 409, 422])
async def test_refusal_is_shown_to_the_model(service: Service, url: str, status: int) -> None:
    service.response = Response("there is no such city", status)
    record = await call_one(weather(url), {"city": "Atlantis"})
    assert (record.fault, record.result.text) == (Fault.EXCEPTION, "Error: there is no such city")


@pytest.mark.parametrize("status", [301, 401, 403, 404, 429, 500, 503])
async def test_other_statuses_are_failures_of_the_host(service: Service, url: str, status: int) -> None:
    service.response = Response("secret", status, {"location": url})
    with pytest.raises(InfrastructureFailure, match=f"the service of the tool 'weather' answered {status}$"):
        await call_one(weather(url, headers={"authorization": "Bearer secret"}), {})


async def test_refused_connection_is_a_failure_of_the_host() -> None:
    with serve(Service()) as url:
        pass
    with pytest.raises(InfrastructureFailure, match=r"does not answer \(ConnectError\)"):
        await call_one(weather(url), {})


async def test_slow_service_is_a_failure_of_the_host(url: str, service: Service) -> None:
    class Slow(Response):
        async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
            await receive()  # until the client goes

    service.response = Slow()
    with pytest.raises(InfrastructureFailure, match=r"does not answer within 0\.2 s"):
        await call_one(weather(url, seconds=0.2), {}, ToolLimits(call_seconds=0.1))
    source = DocumentService(url, seconds=0.2)
    with pytest.raises(InfrastructureFailure, match=r"the search service does not answer within 0\.2 s"):
        await call_one(SearchTool(source), {"query": "a"}, ToolLimits(call_seconds=0.1))
    await source.close()


async def test_endless_body_is_cut(url: str, service: Service) -> None:
    service.response = Response("x" * (3 << 20))
    record = await call_one(weather(url), {})
    assert len(record.result.text.encode()) <= 8192


async def test_cookies_last_as_long_as_the_episode(url: str, service: Service) -> None:
    service.response.set_cookie("session", "7")
    tool = weather(url)
    for _ in range(2):
        async with Toolbox([tool]).open(EPISODE) as tools:
            for _ in range(2):
                await tools.execute(assistant(("weather", {})))
    assert [headers.get("cookie") for _, _, headers in service.requests] == [None, "session=7", None, "session=7"]


async def test_reward_is_requested_at_the_end(url: str, service: Service) -> None:
    service.response = Response('{"reward": 0.5}')
    async with Toolbox([weather(url, reward_url=f"{url}/reward")]).open(EPISODE) as tools:
        await tools.execute(assistant(("weather", {})))
        assert await tools.rewards() == {"weather": 0.5}
        service.response = Response("?", 500)
        with pytest.raises(InfrastructureFailure, match="gave no reward, but status 500"):
            await tools.rewards()
