"""Limits of a key: requests a minute, counted where processes share them, and requests at a time in this process."""

import logging
import math
import time
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from limits import RateLimitItemPerMinute
from limits.aio.storage import RedisStorage
from limits.aio.strategies import MovingWindowRateLimiter
from limits.errors import StorageError
from limits.storage import storage_from_string

from app.core.errors import RateLimited

log = logging.getLogger("attune.limits")
MINUTE = 60.0
REDIS_SECONDS = 0.25
BLIND_SECONDS = 1.0
WARN_SECONDS = 10.0


@dataclass(frozen=True)
class WindowResult:
    """What one request found: was there room, how much is left, and when the next request leaves the window."""

    granted: bool
    remaining: int | None = None
    free_in: float | None = None


class Window(Protocol):
    async def take(self, key_id: str, limit: int) -> WindowResult: ...

    async def close(self) -> None: ...


class MemoryWindow:
    """A moving window in this process: a few microseconds, where the library's hops to a thread for every request."""

    def __init__(self) -> None:
        self._times: dict[str, deque[float]] = {}
        self._swept = time.monotonic()

    async def take(self, key_id: str, limit: int) -> WindowResult:
        now = time.monotonic()
        self._sweep(now)
        times = self._times.setdefault(key_id, deque())
        while times and times[0] <= now - MINUTE:
            times.popleft()
        granted = len(times) < limit
        if granted:
            times.append(now)
        return WindowResult(granted, max(0, limit - len(times)), times[0] + MINUTE - now)

    def _sweep(self, now: float) -> None:
        """Keys that fell silent leave no trace."""
        if now - self._swept > MINUTE:
            self._swept = now
            self._times = {key: times for key, times in self._times.items() if times[-1] > now - MINUTE}

    async def close(self) -> None:
        self._times.clear()


class RedisWindow:
    """A moving window in Redis, for all API processes. When Redis is down requests pass: chats matter more."""

    def __init__(self, url: str) -> None:
        url = url if url.startswith("async+") else f"async+{url}"
        if not url.startswith("async+redis") or "://" not in url:
            raise ValueError(f"ATTUNE_LIMITS_URL is memory:// or async+redis://…, not {url.partition('://')[0]}://…")
        storage = storage_from_string(url, wrap_exceptions=True, **_redis_options())
        assert isinstance(storage, RedisStorage)
        self._storage = storage
        self._windows = MovingWindowRateLimiter(storage)
        self._blind_until = self._quiet_until = 0.0

    async def take(self, key_id: str, limit: int) -> WindowResult:
        if time.monotonic() < self._blind_until:
            return WindowResult(True)
        item = RateLimitItemPerMinute(limit, namespace="attune")
        try:
            if await self._windows.hit(item, key_id):
                return WindowResult(True)  # what is left would cost another round trip
            frees_at, remaining = await self._windows.get_window_stats(item, key_id)
        except StorageError as error:
            self._go_blind(error)
            return WindowResult(True)
        return WindowResult(False, remaining, max(0.0, frees_at - time.time()))

    def _go_blind(self, error: StorageError) -> None:
        """For a moment nobody waits for Redis."""
        now = time.monotonic()
        self._blind_until = now + BLIND_SECONDS
        if now >= self._quiet_until:
            self._quiet_until = now + WARN_SECONDS
            log.warning("requests pass uncounted, as Redis does not answer: %s", error.storage_error)

    async def close(self) -> None:
        bridge: Any = self._storage.bridge
        await bridge.get_connection().aclose()


def _redis_options() -> dict[str, Any]:
    """Without the client's own retries, which would take seconds out of every chat."""
    from redis.asyncio.retry import Retry  # an extra: only who counts in Redis has it
    from redis.backoff import NoBackoff

    return {
        "implementation": "redispy",
        "socket_timeout": REDIS_SECONDS,
        "socket_connect_timeout": REDIS_SECONDS,
        "retry": Retry(NoBackoff(), 0),
    }


class RateLimiter:
    """Both numbers are the deployment's: they hold for a key that has none of its own."""

    def __init__(self, url: str, requests_per_minute: int, max_concurrency: int) -> None:
        self._requests_per_minute, self._max_concurrency = requests_per_minute, max_concurrency
        self._window: Window = MemoryWindow() if url == "memory://" else RedisWindow(url)
        self._running: dict[str, int] = {}

    @asynccontextmanager
    async def slot(
        self, key_id: str, requests_per_minute: int | None, max_concurrency: int | None
    ) -> AsyncIterator[dict[str, str]]:
        """Held from a request's first byte to its reply's last. Gives the headers that tell the key where it stands."""
        self._enter(key_id, max_concurrency or self._max_concurrency)
        try:
            yield await self._count(key_id, requests_per_minute or self._requests_per_minute)
        finally:
            self._leave(key_id)

    def _enter(self, key_id: str, most: int) -> None:
        running = self._running.get(key_id, 0)
        if running >= most:
            raise RateLimited(f"This API key may have {most} requests under way at a time, and has.", retry_after=1)
        self._running[key_id] = running + 1

    def _leave(self, key_id: str) -> None:
        self._running[key_id] -= 1
        if self._running[key_id] == 0:
            del self._running[key_id]

    async def _count(self, key_id: str, limit: int) -> dict[str, str]:
        taken = await self._window.take(key_id, limit)
        headers = _headers(limit, taken)
        if not taken.granted:
            refusal = RateLimited(f"This API key may send {limit} requests a minute.", retry_after=taken.free_in or 1)
            refusal.headers |= headers
            raise refusal
        return headers

    async def close(self) -> None:
        await self._window.close()


def _headers(limit: int, taken: WindowResult) -> dict[str, str]:
    """OpenAI's names. The reset is when the next request leaves the window; what is unknown is left out."""
    headers = {"x-ratelimit-limit-requests": str(limit)}
    if taken.remaining is not None:
        headers["x-ratelimit-remaining-requests"] = str(taken.remaining)
    if taken.free_in is not None:
        headers["x-ratelimit-reset-requests"] = _duration(taken.free_in)
    return headers


def _duration(seconds: float) -> str:
    """Example: 0.25 -> "250ms", 59.2 -> "59.2s", 60.0 -> "1m0s" """
    if seconds < 1:
        return f"{math.ceil(1000 * seconds)}ms"
    minutes, rest = divmod(math.ceil(10 * seconds) / 10, 60)
    return f"{minutes:.0f}m{rest:g}s" if minutes else f"{rest:g}s"
