"""A policy's sources may call public addresses and listed hosts only, whose responses are not quoted in reasons."""

import ipaddress
import socket
from typing import Any

import httpx2
import pytest

from alignment.config.rewards import RewardsConfig
from app.core.settings import Settings
from app.models import Judgement, JudgementState, Policy
from tests.support.deployment import Harness
from tests.support.judgements import ScriptedEndpoint, completion_response, run_judging
from tests.support.settings import by_path
from workers.judging.http_client import GUARDED, NOT_PUBLIC, GuardedTransport, is_public
from workers.queue.leased_job import JobFailed

SECRET = "secret-of-a-private-host"


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
def test_addresses_of_private_networks_are_not_public(address: str, public: bool) -> None:
    assert is_public(ipaddress.ip_address(address)) is public


async def set_policy_rewards(harness: Harness, *sources: dict[str, Any], **updates: Any) -> Settings:
    """Configure the rewards of the policy, as a project's admin does, and return the settings."""
    config = RewardsConfig.model_validate({"sources": [{"type": "explicit"}, *sources]})
    async with harness.db.write() as session:
        (await session.get_one(Policy, (await harness.policy()).id)).rewards = config.model_dump(mode="json")
    return harness.settings.replace(by_path(updates))


def service_source(url: str) -> dict[str, Any]:
    return {"type": "http", "url": f"{url}/reward", "window_seconds": 60.0}


def replace_host(url: str, host: str) -> str:
    return url.replace("127.0.0.1", host)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "127.1", "2130706433", "[::ffff:127.0.0.1]"])
async def test_a_policys_source_in_a_private_network_is_not_called(harness: Harness, host: str) -> None:
    await harness.turn()
    endpoint = ScriptedEndpoint()
    with endpoint.serve() as url:
        [judgement] = await run_judging(
            harness, await set_policy_rewards(harness, service_source(replace_host(url, host)))
        )
    assert (judgement.state, judgement.reason) == (JudgementState.FAILED, NOT_PUBLIC)
    assert endpoint.requests == []


async def test_a_listed_private_host_is_called(harness: Harness) -> None:
    await harness.turn()
    endpoint = ScriptedEndpoint()
    with endpoint.serve() as url:
        settings = await set_policy_rewards(
            harness, service_source(replace_host(url, "localhost")), private_hosts=["LocalHost."]
        )
        [judgement] = await run_judging(harness, settings)
    assert (judgement.state, judgement.value) == (JudgementState.DONE, 1.0)


async def test_a_deployments_source_may_be_in_a_private_network(harness: Harness) -> None:
    await harness.turn()
    endpoint = ScriptedEndpoint()
    with endpoint.serve() as url:
        config = RewardsConfig.model_validate({"sources": [{"type": "explicit"}, service_source(url)]})
        [judgement] = await run_judging(harness, harness.settings.replace({"rewards": config}))
    assert judgement.state == JudgementState.DONE


@pytest.mark.parametrize(
    ("kind", "answer"),
    [
        ("judge", completion_response(f"{SECRET} without a grade")),
        ("judge", SECRET.encode()),
        ("http", SECRET.encode()),
        ("http", {"reward": SECRET}),
    ],
)
async def test_a_private_hosts_response_is_not_quoted_in_the_reason(harness: Harness, kind: str, answer: Any) -> None:
    await harness.turn()
    endpoint = ScriptedEndpoint(answer=lambda body: answer)
    with endpoint.serve() as url:
        source = (
            service_source(url)
            if kind == "http"
            else {"type": "judge", "url": url, "model": "m", "window_seconds": 60.0}
        )
        settings = await set_policy_rewards(harness, source, private_hosts=["127.0.0.1"], max_attempts=1)
        [judgement] = await run_judging(harness, settings)
    assert endpoint.requests and judgement.state == JudgementState.FAILED
    assert judgement.reason and SECRET not in judgement.reason
    [row] = await harness.all(Judgement)
    assert SECRET not in str(row.details)


async def test_a_private_hosts_refusal_is_not_quoted_in_the_reason(harness: Harness) -> None:
    await harness.turn()
    endpoint = ScriptedEndpoint(answer=lambda body: SECRET.encode(), status=400)
    with endpoint.serve() as url:
        source = {"type": "judge", "url": url, "model": "m", "window_seconds": 60.0}
        settings = await set_policy_rewards(harness, source, private_hosts=["127.0.0.1"], max_attempts=1)
        [judgement] = await run_judging(harness, settings)
    assert judgement.reason == "it refused every form of the request"


class RecordingTransport(httpx2.AsyncBaseTransport):
    """Records the address to which each request is sent."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, str, Any]] = []

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        self.requests.append((request.url.host, request.headers["host"], request.extensions.get("sni_hostname")))
        return httpx2.Response(200)


async def test_the_address_that_was_checked_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    """The name server first returns a public address and then a private one."""
    answers = ["93.184.216.34", "127.0.0.1"]

    def resolve(host: str, *args: Any, **kwargs: Any) -> list[Any]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (answers.pop(0), 0))]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    guard = GuardedTransport([])
    guard._guarded_transport = recording = RecordingTransport()  # type: ignore[assignment]
    async with httpx2.AsyncClient(transport=guard) as http:
        await http.post("https://rebinding.example/reward", extensions={GUARDED: True})
        assert recording.requests == [("93.184.216.34", "rebinding.example", "rebinding.example")]
        with pytest.raises(JobFailed):
            await http.post("https://rebinding.example/reward", extensions={GUARDED: True})
    assert len(recording.requests) == 1
