"""Rate limits of an API key: requests per minute, concurrent requests, and the error that is sent."""

import asyncio
import logging
import socket
from uuid import uuid4

import httpx2
import pytest

from app.core import rate_limits
from app.core.errors import RateLimited
from app.core.rate_limits import MemoryWindow, RateLimiter
from tests.app.projects.test_endpoints import bearer, create_key
from tests.conftest import missing
from tests.support.deployment import Harness
from tests.support.scripted_engine import ScriptedEngine

CHAT = {"model": "shop", "messages": [{"role": "user", "content": "When are you open?"}]}
REDIS = "async+redis://127.0.0.1:6379"


@pytest.fixture
def redis() -> str:
    try:
        socket.create_connection(("127.0.0.1", 6379), timeout=1).close()
    except OSError as error:
        missing(f"no Redis at {REDIS} ({error})")
    return REDIS


class Clock:
    def __init__(self) -> None:
        self.seconds = 1000.0

    def monotonic(self) -> float:
        return self.seconds


async def take(one: RateLimiter, key_id: str, limit: int) -> dict[str, str]:
    async with one.slot(key_id, limit, None) as headers:
        return headers


async def test_memory_window_moves_with_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, window = Clock(), MemoryWindow()
    monkeypatch.setattr(rate_limits, "time", clock)
    for left in (2, 1, 0):
        room = await window.take("key-a", 3)
        assert (room.allowed, room.remaining) == (True, left)
        clock.seconds += 10
    refused = await window.take("key-a", 3)
    assert (refused.allowed, refused.remaining, refused.reset_seconds) == (False, 0, 30)
    assert (await window.take("key-b", 3)).allowed
    clock.seconds += 30
    assert (await window.take("key-a", 3)).allowed
    assert not (await window.take("key-a", 3)).allowed


async def test_inactive_keys_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(rate_limits, "time", clock)
    window = MemoryWindow()
    for number in range(100):
        await window.take(f"key-{number}", 3)
    clock.seconds += 61
    await window.take("key-new", 3)
    assert list(window._times) == ["key-new"]


@pytest.mark.parametrize(
    ("seconds", "expected"), [(0.25, "250ms"), (0.0, "0ms"), (7.0, "7s"), (59.24, "59.3s"), (60.0, "1m0s")]
)
def test_durations_are_formatted_as_openai_does(seconds: float, expected: str) -> None:
    assert rate_limits._duration(seconds) == expected


async def test_key_over_its_limit_is_refused_and_others_are_not(harness: Harness) -> None:
    key = (await create_key(harness, requests_per_minute=2))["key"]
    for left in ("1", "0"):
        answer = await harness.api.get("/v1/models", headers=bearer(key))
        assert answer.status_code == 200
        assert answer.headers["x-ratelimit-limit-requests"] == "2"
        assert answer.headers["x-ratelimit-remaining-requests"] == left
    for route in ("/v1/models", "/v1/feedback?completion_id=x"):
        refused = await harness.api.get(route, headers=bearer(key))
        assert refused.status_code == 429 and 1 <= int(refused.headers["retry-after"]) <= 60
        assert refused.headers["x-ratelimit-remaining-requests"] == "0"
        assert refused.headers["x-ratelimit-reset-requests"].endswith(("s", "ms"))
        error = refused.json()["error"]
        assert (error["type"], error["code"], error["param"]) == ("rate_limit_error", "rate_limit_exceeded", None)
    assert (await harness.api.get("/v1/keys", headers=bearer(key))).status_code == 200  # admins are not limited
    own_key = await harness.api.get("/v1/models")
    assert (own_key.status_code, own_key.headers["x-ratelimit-limit-requests"]) == (200, "6000")


async def test_concurrency_is_limited_and_every_exit_frees_the_slot() -> None:
    one = RateLimiter("memory://", 100, 2)
    async with one.slot("key-a", None, None), one.slot("key-a", None, None):
        with pytest.raises(RateLimited, match="2 requests under way") as refusal:
            await take(one, "key-a", 100)
        assert refusal.value.headers == {"retry-after": "1"}
        await take(one, "key-b", 100)
    with pytest.raises(RateLimited):
        for _ in range(3):
            await take(one, "key-a", 2)
    with pytest.raises(asyncio.CancelledError):
        async with one.slot("key-c", None, None):
            raise asyncio.CancelledError
    assert one._running == {}


async def test_refused_body_frees_its_slot(harness: Harness) -> None:
    key = (await create_key(harness, max_concurrency=1))["key"]
    for _ in range(3):
        assert (await harness.api.post("/v1/feedback", content=b"{", headers=bearer(key))).status_code == 400
    assert (await harness.api.get("/v1/models", headers=bearer(key))).status_code == 200


async def wait_until_free(api: httpx2.AsyncClient) -> httpx2.Response:
    async with asyncio.timeout(20):
        while (answer := await api.get("/v1/models")).status_code == 429:
            await asyncio.sleep(0.02)
    return answer


@pytest.mark.parametrize("disconnects", [True, False])
async def test_streamed_reply_keeps_its_slot_until_it_ends_or_the_client_disconnects(
    harness: Harness, served: str, scripted: ScriptedEngine, disconnects: bool
) -> None:
    scripted.seconds_per_token = 0.1
    if disconnects:
        scripted.reply_text = "word " * 400  # 40 s: longer than the test waits for the slot
    key = (await create_key(harness, max_concurrency=1))["key"]
    async with httpx2.AsyncClient(base_url=served, headers=bearer(key), trust_env=False) as api:
        async with api.stream("POST", "/v1/chat/completions", json=CHAT | {"stream": True}) as reply:
            lines = reply.aiter_lines()
            assert reply.status_code == 200 and (await anext(lines)).startswith("data:")
            refused_meanwhile = await api.get("/v1/models")
            assert refused_meanwhile.status_code == 429 and "1 requests under way" in refused_meanwhile.text
            if not disconnects:
                assert [line async for line in lines if line][-1] == "data: [DONE]"
        assert (await wait_until_free(api)).status_code == 200


async def test_processes_share_a_window_in_redis(redis: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rate_limits, "REDIS_TIMEOUT_SECONDS", 30.0)  # on a busy machine no request may pass uncounted
    one, other = RateLimiter(redis, 3, 10), RateLimiter(redis.removeprefix("async+"), 3, 10)
    key = uuid4().hex
    for process in (one, other, one):
        assert await take(process, key, 3) == {"x-ratelimit-limit-requests": "3"}
    with pytest.raises(RateLimited) as refusal:
        await take(other, key, 3)
    assert 1 <= int(refusal.value.headers["retry-after"]) <= 60
    assert refusal.value.headers["x-ratelimit-remaining-requests"] == "0"
    await take(other, uuid4().hex, 3)
    await one.close()
    await other.close()


async def test_concurrent_requests_are_counted_exactly_in_redis(redis: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rate_limits, "REDIS_TIMEOUT_SECONDS", 30.0)  # on a busy machine no request may pass uncounted
    one, key = RateLimiter(redis, 20, 100), uuid4().hex
    outcomes = await asyncio.gather(*(take(one, key, 20) for _ in range(50)), return_exceptions=True)
    assert len([outcome for outcome in outcomes if isinstance(outcome, RateLimited)]) == 30
    await one.close()


async def test_requests_pass_when_redis_is_down_with_one_warning(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rate_limits, "BYPASS_SECONDS", 0.0)
    one = RateLimiter("async+redis://127.0.0.1:1", 1, 10)
    with caplog.at_level(logging.WARNING, "attune.limits"):
        for _ in range(20):
            await take(one, "key-a", 1)
    assert len(caplog.records) == 1 and "pass uncounted" in caplog.text
    await one.close()


async def test_hanging_redis_delays_concurrent_requests_but_not_later_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rate_limits, "BYPASS_SECONDS", 600.0)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        one = RateLimiter(f"async+redis://127.0.0.1:{silent.getsockname()[1]}", 1, 10)
        async with asyncio.timeout(60):
            await asyncio.gather(*(take(one, "key-a", 1) for _ in range(5)))

        def asks(*args: object) -> None:
            raise AssertionError("Redis is asked again, though it did not answer a moment ago")

        monkeypatch.setattr(one._window._windows, "hit", asks)  # type: ignore[attr-defined]
        await take(one, "key-a", 1)
        await one.close()


@pytest.mark.parametrize("url", ["async+mongodb://127.0.0.1", "redis"])
def test_unknown_limits_url_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="is memory:// or async"):
        RateLimiter(url, 1, 1)


async def test_api_counts_in_redis(redis: str, harness: Harness) -> None:
    harness.api._transport.app.services.put(RateLimiter(redis, 100, 10))  # type: ignore[attr-defined]
    key = (await create_key(harness, requests_per_minute=1))["key"]
    assert (await harness.api.get("/v1/models", headers=bearer(key))).status_code == 200
    assert (await harness.api.get("/v1/models", headers=bearer(key))).status_code == 429
