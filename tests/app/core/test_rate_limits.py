"""Rate limits of an API key: requests per minute, concurrent requests, and the error that is sent."""

import asyncio
import logging
import socket
from uuid import uuid4

import httpx2
import pytest

from app.core import rate_limits
from app.core.errors import RateLimited
from app.core.rate_limits import MemoryWindow, RateLimiter, RedisWindow
from app.projects.auth import ApiKeyCache
from tests.app.projects.test_endpoints import bearer, create_key
from tests.conftest import skip_or_fail
from tests.support.deployment import Harness
from tests.support.scripted_engine import ScriptedEngine

CHAT = {"model": "shop", "messages": [{"role": "user", "content": "When are you open?"}]}
REDIS = "async+redis://127.0.0.1:6379"


@pytest.fixture
def redis() -> str:
    try:
        socket.create_connection(("127.0.0.1", 6379), timeout=1).close()
    except OSError as error:
        skip_or_fail(f"no Redis at {REDIS} ({error})")
    return REDIS


class Clock:
    def __init__(self) -> None:
        self.seconds = 1000.0

    def monotonic(self) -> float:
        return self.seconds


async def take(limiter: RateLimiter, key_id: str, limit: int) -> dict[str, str]:
    async with limiter.slot(key_id, limit, None) as headers:
        return headers


async def test_memory_window_moves_with_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, window = Clock(), MemoryWindow()
    monkeypatch.setattr(rate_limits, "time", clock)
    for remaining in (2, 1, 0):
        result = await window.take("key-a", 3)
        assert (result.allowed, result.remaining) == (True, remaining)
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
    for remaining in ("1", "0"):
        response = await harness.api.get("/v1/models", headers=bearer(key))
        assert response.status_code == 200
        assert response.headers["x-ratelimit-limit-requests"] == "2"
        assert response.headers["x-ratelimit-remaining-requests"] == remaining
    for route in ("/v1/models", "/v1/feedback?completion_id=x"):
        refused = await harness.api.get(route, headers=bearer(key))
        assert refused.status_code == 429 and 1 <= int(refused.headers["retry-after"]) <= 60
        assert refused.headers["x-ratelimit-remaining-requests"] == "0"
        assert refused.headers["x-ratelimit-reset-requests"].endswith(("s", "ms"))
        error = refused.json()["error"]
        assert (error["type"], error["code"], error["param"]) == ("rate_limit_error", "rate_limit_exceeded", None)
    assert (await harness.api.get("/v1/keys", headers=bearer(key))).status_code == 200  # admins are not limited
    default_response = await harness.api.get("/v1/models")
    assert (default_response.status_code, default_response.headers["x-ratelimit-limit-requests"]) == (200, "6000")


async def test_concurrency_is_limited_and_every_exit_frees_the_slot() -> None:
    limiter = RateLimiter("memory://", 100, 2)
    async with limiter.slot("key-a", None, None), limiter.slot("key-a", None, None):
        with pytest.raises(RateLimited, match="2 requests under way") as refusal:
            await take(limiter, "key-a", 100)
        assert refusal.value.headers == {"retry-after": "1"}
        await take(limiter, "key-b", 100)
    with pytest.raises(RateLimited):
        for _ in range(3):
            await take(limiter, "key-a", 2)
    with pytest.raises(asyncio.CancelledError):
        async with limiter.slot("key-c", None, None):
            raise asyncio.CancelledError
    assert limiter._running == {}


async def test_refused_body_frees_its_slot(harness: Harness) -> None:
    key = (await create_key(harness, max_concurrency=1))["key"]
    for _ in range(3):
        assert (await harness.api.post("/v1/feedback", content=b"{", headers=bearer(key))).status_code == 400
    assert (await harness.api.get("/v1/models", headers=bearer(key))).status_code == 200


async def wait_until_free(api: httpx2.AsyncClient) -> httpx2.Response:
    async with asyncio.timeout(20):
        while (response := await api.get("/v1/models")).status_code == 429:
            await asyncio.sleep(0.02)
    return response


@pytest.mark.parametrize("disconnects", [True, False])
async def test_streamed_reply_keeps_its_slot_until_it_ends_or_the_client_disconnects(
    harness: Harness, live_url: str, scripted: ScriptedEngine, disconnects: bool
) -> None:
    scripted.is_blocked = lambda reply: len(reply.output_ids) == 1
    key = (await create_key(harness, max_concurrency=1))["key"]
    async with httpx2.AsyncClient(base_url=live_url, headers=bearer(key), trust_env=False) as api:
        async with api.stream("POST", "/v1/chat/completions", json=CHAT | {"stream": True}) as reply:
            lines = reply.aiter_lines()
            assert reply.status_code == 200 and (await anext(lines)).startswith("data:")
            refused = await api.get("/v1/models")
            assert refused.status_code == 429 and "1 requests under way" in refused.text
            if not disconnects:
                scripted.is_blocked = lambda reply: False
                assert [line async for line in lines if line][-1] == "data: [DONE]"
        assert (await wait_until_free(api)).status_code == 200


async def test_processes_share_a_window_in_redis(redis: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rate_limits, "REDIS_TIMEOUT_SECONDS", 30.0)  # on a busy machine no request may pass uncounted
    limiter, second_limiter = RateLimiter(redis, 3, 10), RateLimiter(redis.removeprefix("async+"), 3, 10)
    key = uuid4().hex
    for process in (limiter, second_limiter, limiter):
        assert await take(process, key, 3) == {"x-ratelimit-limit-requests": "3"}
    with pytest.raises(RateLimited) as refusal:
        await take(second_limiter, key, 3)
    assert 1 <= int(refusal.value.headers["retry-after"]) <= 60
    assert refusal.value.headers["x-ratelimit-remaining-requests"] == "0"
    await take(second_limiter, uuid4().hex, 3)
    await limiter.close()
    await second_limiter.close()


async def test_concurrent_requests_are_counted_exactly_in_redis(redis: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rate_limits, "REDIS_TIMEOUT_SECONDS", 30.0)  # on a busy machine no request may pass uncounted
    limiter, key = RateLimiter(redis, 20, 100), uuid4().hex
    outcomes = await asyncio.gather(*(take(limiter, key, 20) for _ in range(50)), return_exceptions=True)
    assert len([outcome for outcome in outcomes if isinstance(outcome, RateLimited)]) == 30
    await limiter.close()


async def test_a_refused_batch_leaves_the_minute_to_others(redis: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rate_limits, "REDIS_TIMEOUT_SECONDS", 30.0)
    window, name = RedisWindow(redis), uuid4().hex
    assert not await window.add(name, 1_000, 500)
    assert await window.add(name, 500, 500) and not await window.add(name, 1, 500)
    await window.close()


async def test_a_process_counts_alone_when_redis_is_down_with_one_warning(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rate_limits, "BYPASS_SECONDS", 0.0)
    monkeypatch.setattr(rate_limits, "MINUTE", 1e10)  # none ends between two requests
    limiter = RateLimiter("async+redis://127.0.0.1:1", 100, 10)
    with caplog.at_level(logging.WARNING, "attune.limits"):
        for _ in range(20):
            await take(limiter, "key-a", 20)
        with pytest.raises(RateLimited):
            await take(limiter, "key-a", 20)
        await take(limiter, "key-b", 20)
        await limiter.count_feedback("proj-a", 5, 5)
        with pytest.raises(RateLimited):
            await limiter.count_feedback("proj-a", 1, 5)
    assert len(caplog.records) == 1 and "counts requests alone" in caplog.text
    await limiter.close()


async def test_hanging_redis_delays_concurrent_requests_but_not_later_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rate_limits, "BYPASS_SECONDS", 600.0)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        limiter = RateLimiter(f"async+redis://127.0.0.1:{silent.getsockname()[1]}", 10, 10)
        async with asyncio.timeout(60):
            await asyncio.gather(*(take(limiter, "key-a", 10) for _ in range(5)))

        def fail_if_called(*args: object) -> None:
            raise AssertionError("Redis is called again, though it did not respond a moment ago")

        assert isinstance(limiter._window, RedisWindow)
        monkeypatch.setattr(limiter._window._windows, "hit", fail_if_called)
        await take(limiter, "key-a", 10)
        await limiter.close()


@pytest.mark.parametrize("url", ["async+mongodb://127.0.0.1", "redis"])
def test_unknown_limits_url_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="is memory:// or async"):
        RateLimiter(url, 1, 1)


async def test_api_counts_in_redis(redis: str, harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rate_limits, "REDIS_TIMEOUT_SECONDS", 30.0)
    harness.api._transport.app.services.put(RateLimiter(redis, 100, 10))  # type: ignore[attr-defined]
    key = (await create_key(harness, requests_per_minute=1))["key"]
    assert (await harness.api.get("/v1/models", headers=bearer(key))).status_code == 200
    assert (await harness.api.get("/v1/models", headers=bearer(key))).status_code == 429


async def test_unknown_keys_are_throttled_and_known_keys_are_not(harness: Harness) -> None:
    known = (await create_key(harness))["key"]
    assert (await harness.api.get("/v1/models", headers=bearer(known))).status_code == 200
    keys, limit = harness.api._transport.app.services.get(ApiKeyCache), 100  # type: ignore[attr-defined]
    answers = [await harness.api.get("/v1/models", headers=bearer(f"sk-{number}")) for number in range(limit + 2)]
    assert [answer.status_code for answer in answers] == [401] * limit + [429] * 2
    assert answers[-1].json()["error"]["code"] == "too_many_unknown_keys"
    assert int(answers[-1].headers["retry-after"]) == 60
    keys.forget()
    assert (await harness.api.get("/v1/models", headers=bearer(known))).status_code == 200
