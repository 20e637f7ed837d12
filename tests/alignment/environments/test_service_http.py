"""Requests to the service: a busy one is asked again, a refusal has its code, and what is down is infrastructure."""

from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from alignment.environments.errors import InfrastructureFailure, ServiceRefusal
from alignment.environments.service_http import ServiceHttp
from tests.support.scripted_engine import serve

BUSY = (503, {"error": {"message": "no engine", "code": "engine_unavailable"}})


class Service:
    """It answers with these statuses and bodies, one after another, and then with 201."""

    def __init__(self, *answers: tuple[int, object]) -> None:
        self._answers = list(answers)
        self.keys: list[str] = []
        self.retry_counts: list[str | None] = []

    async def answer(self, request: Request) -> Response:
        self.retry_counts.append(request.headers.get("x-stainless-retry-count"))
        self.keys.append(request.headers["authorization"])
        status, body = self._answers.pop(0) if self._answers else (201, await request.json())
        return JSONResponse(body, status, headers={"retry-after": "0"} if status in (429, 503) else None)


@pytest.fixture
async def http() -> AsyncIterator[ServiceHttp]:
    client = ServiceHttp(patience=5.0)
    yield client
    await client.close()


@contextmanager
def serve_answers(service: Service) -> Iterator[str]:
    with serve(Starlette(routes=[Route("/v1/episodes", service.answer, methods=["POST"])])) as url:
        yield f"{url}/v1/episodes"


async def test_busy_service_is_asked_again(http: ServiceHttp) -> None:
    service = Service(BUSY, (429, {"error": {"message": "slow down", "code": "rate_limit_exceeded"}}))
    with serve_answers(service) as url:
        answer = await http.request("POST", url, "sk-1", {"policy": "shop"})
        assert answer.is_created and answer.content == b'{"policy":"shop"}'
    assert service.keys == ["Bearer sk-1"] * 3
    assert service.retry_counts == [None, "1", "2"], "the service knows a repetition by it, and learns from one reply"


async def test_busy_service_is_given_up(http: ServiceHttp) -> None:
    impatient = ServiceHttp(patience=-1.0)
    expected = pytest.raises(InfrastructureFailure, match="the service is busy: no engine")
    with serve_answers(Service(BUSY)) as url, expected:
        await impatient.request("POST", url, "sk-1", {})
    await impatient.close()


@pytest.mark.parametrize(
    ("body", "code", "message"),
    [
        ({"error": {"message": "it has ended", "code": "episode_ended"}}, "episode_ended", "it has ended"),
        ({"error": {"message": "no temperature", "code": 400}}, "400", "no temperature"),  # as vLLM answers
        ("a proxy", None, "status 409, not as Attune answers"),
    ],
)
async def test_refusal(http: ServiceHttp, body: object, code: str | None, message: str) -> None:
    service = Service((409, body))
    with serve_answers(service) as url:
        with pytest.raises(ServiceRefusal, match=message) as raised:
            await http.request("POST", url, "sk-1", {})
        assert (raised.value.status, raised.value.code) == (409, code)
    assert len(service.keys) == 1


@pytest.mark.parametrize("status", [301, 500])
async def test_other_answers_are_failures_of_the_host(http: ServiceHttp, status: int) -> None:
    expected = pytest.raises(InfrastructureFailure, match=f"answered with status {status}")
    with serve_answers(Service((status, {}))) as url, expected:
        await http.request("POST", url, "sk-1", {})


async def test_service_that_does_not_answer_in_time(http: ServiceHttp) -> None:
    with serve_answers(Service()) as url, pytest.raises(InfrastructureFailure, match="does not answer within 0 s"):
        await http.request("POST", url, "sk-1", {}, seconds=0.0)
