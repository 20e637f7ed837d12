"""A policy's own sources reach public addresses only, unless the deployment lists the host; and pass nothing on."""

import ipaddress
import socket
from typing import Any

import httpx2
import pytest

from alignment.config.rewards import RewardsConfig
from app.core.settings import Settings
from app.models import Judgement, JudgementState, Policy
from tests.support.deployment import Harness
from tests.support.judgements import Oracle, completion, judged
from workers.judging.request import Broken
from workers.judging.sources.address_guard import GUARDED, NOT_PUBLIC, Doors, is_public

CANARY = "canary-of-the-inside"


@pytest.mark.parametrize(
    ("address", "public"),
    [
        ("93.184.216.34", True),
        ("2606:2800:220:1:248:1893:25c8:1946", True),
        ("127.0.0.1", False),
        ("0.0.0.0", False),
        ("10.1.2.3", False),
        ("172.16.0.1", False),
        ("192.168.1.1", False),
        ("100.64.0.1", False),
        ("169.254.169.254", False),
        ("168.63.129.16", False),
        ("224.0.0.1", False),
        ("::1", False),
        ("::", False),
        ("fe80::1", False),
        ("fd00:ec2::254", False),
        ("::ffff:10.0.0.1", False),
        ("64:ff9b::a00:1", False),
        ("64:ff9b::808:808", True),
        ("2002:7f00:1::", False),
        ("192.0.0.192", False),
        ("64:ff9b:1::a00:1", False),
        ("fec0::1", False),
        ("::127.0.0.1", False),
        ("::ffff:0:7f00:1", False),
        ("5f00::1", False),
    ],
)
def test_only_public_addresses_are_public(address: str, public: bool) -> None:
    assert is_public(ipaddress.ip_address(address)) is public


async def own(harness: Harness, *sources: dict[str, Any], **changed: Any) -> Settings:
    """The policy's own rewards, as a project's admin sets them."""
    config = RewardsConfig.model_validate({"sources": [{"type": "explicit"}, *sources]})
    async with harness.db.write() as session:
        (await session.get_one(Policy, (await harness.policy()).id)).rewards = config.model_dump(mode="json")
    return harness.settings.model_copy(update=changed)


def service(url: str) -> dict[str, Any]:
    return {"type": "http", "url": f"{url}/reward", "window_seconds": 60.0}


def named(url: str, host: str) -> str:
    return url.replace("127.0.0.1", host)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "127.1", "2130706433", "[::ffff:127.0.0.1]"])
async def test_a_policys_own_source_in_a_private_network_is_never_asked(harness: Harness, host: str) -> None:
    await harness.turn()
    oracle = Oracle()
    with oracle.at() as url:
        [judgement] = await judged(harness, await own(harness, service(named(url, host))))
    assert (judgement.state, judgement.reason) == (JudgementState.FAILED, NOT_PUBLIC)
    assert oracle.heard == []


async def test_a_host_that_the_deployment_lists_is_asked(harness: Harness) -> None:
    await harness.turn()
    oracle = Oracle()
    with oracle.at() as url:
        settings = await own(harness, service(named(url, "localhost")), private_hosts=["LocalHost."])
        [judgement] = await judged(harness, settings)
    assert (judgement.state, judgement.value) == (JudgementState.DONE, 1.0)


async def test_the_deployments_own_source_may_be_anywhere(harness: Harness) -> None:
    await harness.turn()
    oracle = Oracle()
    with oracle.at() as url:
        config = RewardsConfig.model_validate({"sources": [{"type": "explicit"}, service(url)]})
        [judgement] = await judged(harness, harness.settings.model_copy(update={"rewards": config}))
    assert judgement.state == JudgementState.DONE


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("judge", completion(f"{CANARY} without a grade")),
        ("judge", CANARY.encode()),
        ("http", CANARY.encode()),
        ("http", {"reward": CANARY}),
    ],
)
async def test_what_such_a_host_says_is_in_no_reason(harness: Harness, kind: str, told: Any) -> None:
    await harness.turn()
    oracle = Oracle(answer=lambda body: told)
    with oracle.at() as url:
        source = service(url) if kind == "http" else {"type": "judge", "url": url, "model": "m", "window_seconds": 60.0}
        settings = await own(harness, source, private_hosts=["127.0.0.1"], max_attempts=1)
        [judgement] = await judged(harness, settings)
    assert oracle.heard and judgement.state == JudgementState.FAILED
    assert judgement.reason and CANARY not in judgement.reason
    [row] = await harness.all(Judgement)
    assert CANARY not in str(row.details)


async def test_a_refusal_of_the_question_is_not_quoted_either(harness: Harness) -> None:
    await harness.turn()
    oracle = Oracle(answer=lambda body: CANARY.encode(), status=400)
    with oracle.at() as url:
        source = {"type": "judge", "url": url, "model": "m", "window_seconds": 60.0}
        settings = await own(harness, source, private_hosts=["127.0.0.1"], max_attempts=1)
        [judgement] = await judged(harness, settings)
    assert judgement.reason == "it refused every form of the question"


class Heard(httpx2.AsyncBaseTransport):
    """Where it was really sent."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, str, Any]] = []

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        told = (request.url.host, request.headers["host"], request.extensions.get("sni_hostname"))
        self.requests.append(told)
        return httpx2.Response(200)


async def test_the_address_that_was_looked_at_is_the_one_that_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name server that says something public first and something private then."""
    answers = ["93.184.216.34", "127.0.0.1"]

    def resolve(host: str, *rest: Any, **more: Any) -> list[Any]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (answers.pop(0), 0))]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    doors = Doors([])
    doors._once = heard = Heard()  # type: ignore[assignment]
    async with httpx2.AsyncClient(transport=doors) as http:
        await http.post("https://rebinding.example/reward", extensions={GUARDED: True})
        assert heard.requests == [("93.184.216.34", "rebinding.example", "rebinding.example")]
        with pytest.raises(Broken):
            await http.post("https://rebinding.example/reward", extensions={GUARDED: True})
    assert len(heard.requests) == 1
