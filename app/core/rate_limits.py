"""Rate limits of keys and projects: requests per minute (in Redis if processes share the count), and concurrent
requests in this process."""

import logging
import math
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any

from limits import RateLimitItemPerMinute
from limits.aio.storage import RedisStorage
from limits.aio.strategies import FixedWindowRateLimiter, MovingWindowRateLimiter
from limits.errors import StorageError
from limits.storage import storage_from_string

from app.core.errors import RateLimited

log = logging.getLogger("attune.limits")
MINUTE = 60.0
REDIS_TIMEOUT_SECONDS = 0.25
BYPASS_SECONDS = 1.0  # after a failure of Redis, this process counts alone
WARN_INTERVAL_SECONDS = 10.0


@dataclass(frozen=True)
class WindowResult:
    """The answer to one request. `reset_seconds`: until the oldest request leaves the window. None: not known."""

    allowed: bool
    remaining: int | None = None
    reset_seconds: float | None = None


class MemoryWindow:
    """A moving window in this process. It costs microseconds; the library's switches to a thread for every request."""

    def __init__(self) -> None:
        self._times: dict[str, deque[float]] = {}
        self._purged_at = time.monotonic()

    async def take(self, key_id: str, limit: int) -> WindowResult:
        """Count a request, unless the window holds `limit` requests already."""
        now = time.monotonic()
        self._purge(now)
        times = self._times.setdefault(key_id, deque())
        while times and times[0] <= now - MINUTE:
            times.popleft()
        allowed = len(times) < limit
        if allowed:
            times.append(now)
        return WindowResult(allowed, max(0, limit - len(times)), times[0] + MINUTE - now)

    def count(self, key_id: str) -> int:
        """Return the number of requests in the last minute."""
        times, start = self._times.get(key_id, deque()), time.monotonic() - MINUTE
        while times and times[0] <= start:
            times.popleft()
        return len(times)

    def _purge(self, now: float) -> None:
        """Forget the keys without a request in the last minute."""
        if now - self._purged_at > MINUTE:
            self._purged_at = now
            self._times = {key: times for key, times in self._times.items() if times and times[-1] > now - MINUTE}

    async def close(self) -> None:
        self._times.clear()


class MemoryCounter:
    """Counts by minute of the clock in this process: for numbers that are too large for a moving window."""

    def __init__(self) -> None:
        self._minute, self._counts = 0, Counter[str]()

    async def add(self, name: str, amount: int, limit: int) -> bool:
        """Count `amount` in this minute if the count stays within the limit; return whether it does."""
        if (minute := int(time.monotonic() // MINUTE)) != self._minute:
            self._minute, self._counts = minute, Counter()
        allowed = self._counts[name] + amount <= limit
        if allowed:
            self._counts[name] += amount
        return allowed


class RedisWindow:
    """Windows in Redis, shared by all API processes. While Redis is down, each process counts for itself."""

    def __init__(self, url: str) -> None:
        url = url if url.startswith("async+") else f"async+{url}"
        if not url.startswith("async+redis") or "://" not in url:
            raise ValueError(f"ATTUNE_LIMITS__URL is memory:// or async+redis://…, not {url.partition('://')[0]}://…")
        from redis.asyncio.retry import Retry  # an optional dependency
        from redis.backoff import NoBackoff

        options: dict[str, Any] = {
            "implementation": "redispy",
            "socket_timeout": REDIS_TIMEOUT_SECONDS,
            "socket_connect_timeout": REDIS_TIMEOUT_SECONDS,
            "retry": Retry(NoBackoff(), 0),  # the client's own retries would delay every chat by seconds
        }
        storage = storage_from_string(url, wrap_exceptions=True, **options)
        assert isinstance(storage, RedisStorage)
        self._storage = storage
        self._windows, self._counters = MovingWindowRateLimiter(storage), FixedWindowRateLimiter(storage)
        self._local, self._local_counter = MemoryWindow(), MemoryCounter()
        self._bypass_until = self._warn_after = 0.0

    async def take(self, key_id: str, limit: int) -> WindowResult:
        """Count a request, unless the window holds `limit` requests already."""
        if time.monotonic() < self._bypass_until:
            return await self._local.take(key_id, limit)
        item = RateLimitItemPerMinute(limit, namespace="attune")
        try:
            if await self._windows.hit(item, key_id):
                return WindowResult(True)  # the remaining count would cost another round trip
            reset_at, remaining = await self._windows.get_window_stats(item, key_id)
        except StorageError as error:
            self._bypass(error)
            return await self._local.take(key_id, limit)
        return WindowResult(False, remaining, max(0.0, reset_at - time.time()))

    async def add(self, name: str, amount: int, limit: int) -> bool:
        """Count `amount` in this minute if the count stays within the limit; return whether it does."""
        if time.monotonic() >= self._bypass_until:
            try:
                item = RateLimitItemPerMinute(limit, namespace="attune")
                # `hit` counts before it compares: a batch that is refused would use the minute up.
                return await self._counters.test(item, name, cost=amount) and await self._counters.hit(
                    item, name, cost=amount
                )
            except StorageError as error:
                self._bypass(error)
        return await self._local_counter.add(name, amount, limit)

    def _bypass(self, error: StorageError) -> None:
        """Leave Redis alone for a moment, so that requests do not all wait for it."""
        self._bypass_until = time.monotonic() + BYPASS_SECONDS
        if time.monotonic() >= self._warn_after:
            self._warn_after = time.monotonic() + WARN_INTERVAL_SECONDS
            log.warning("this process counts requests alone, because Redis does not answer: %s", error.storage_error)

    async def close(self) -> None:
        bridge: Any = self._storage.bridge
        await bridge.get_connection().aclose()


class RateLimiter:
    """Applies the limits of API keys. The two numbers hold for keys without limits of their own."""

    def __init__(self, url: str, requests_per_minute: int, max_concurrency: int) -> None:
        self._requests_per_minute, self._max_concurrency = requests_per_minute, max_concurrency
        redis = None if url == "memory://" else RedisWindow(url)
        self._window: MemoryWindow | RedisWindow = redis or MemoryWindow()
        self._counter: MemoryCounter | RedisWindow = redis or MemoryCounter()
        self._unknown_keys = MemoryWindow()
        self._running: Counter[str] = Counter()

    @asynccontextmanager
    async def slot(
        self,
        key_id: str,
        requests_per_minute: int | None,
        max_concurrency: int | None,
        project: tuple[str, int | None] | None = None,
    ) -> AsyncIterator[dict[str, str]]:
        """Take a slot of the key, from a request's first byte to its reply's last. Yields the rate-limit headers.

        The key's own limits hold where they are below the deployment's. `project` is its id, and its requests a minute.

        Raises RateLimited when the key has too many requests in this minute or at the same time.
        """
        limit = min(max_concurrency or self._max_concurrency, self._max_concurrency)
        with self.concurrent(key_id, limit, f"This API key may have {limit} requests under way at a time, and has."):
            per_minute = min(requests_per_minute or self._requests_per_minute, self._requests_per_minute)
            headers = await self._count(key_id, per_minute)
            if project is not None and project[1] is not None:
                await self._count_for_project(project[0], project[1])
            yield headers

    @contextmanager
    def concurrent(self, name: str, limit: int, message: str, code: str | None = None) -> Iterator[None]:
        """Count the block among the concurrent ones of this name. Raises RateLimited with `message` beyond `limit`."""
        if self._running[name] >= limit:
            raise RateLimited(message, code=code, retry_after=1)
        self._running[name] += 1
        try:
            yield
        finally:
            self._running[name] -= 1
            if self._running[name] == 0:
                del self._running[name]

    async def _count(self, key_id: str, limit: int) -> dict[str, str]:
        """Count a request in the last minute. Returns OpenAI's rate-limit headers; an unknown value is left out."""
        result = await self._window.take(key_id, limit)
        headers = {"x-ratelimit-limit-requests": str(limit)}
        if result.remaining is not None:
            headers["x-ratelimit-remaining-requests"] = str(result.remaining)
        if result.reset_seconds is not None:
            headers["x-ratelimit-reset-requests"] = _duration(result.reset_seconds)
        if not result.allowed:
            message = f"This API key may send {limit} requests a minute."
            error = RateLimited(message, retry_after=result.reset_seconds or 1)
            error.headers |= headers
            raise error
        return headers

    async def _count_for_project(self, project_id: str, limit: int) -> None:
        result = await self._window.take(f"project:{project_id}", limit) if limit else WindowResult(False)
        if not result.allowed:
            message = f"This project's keys may send {limit} requests a minute, tokens included (requests_per_minute)."
            raise RateLimited(message, code="project_limit", retry_after=result.reset_seconds or MINUTE)

    async def count_admin_request(self, project_id: str, limit: int | None) -> None:
        """Count a request other than a chat or feedback. Raises RateLimited beyond the project's limit."""
        if limit is None:
            return
        result = await self._window.take(f"admin:{project_id}", limit) if limit else WindowResult(False)
        if not result.allowed:
            message = (
                f"This project's keys may send {limit} requests a minute other than chats and feedback "
                "(admin_requests_per_minute)."
            )
            raise RateLimited(message, code="project_limit", retry_after=result.reset_seconds or MINUTE)

    async def count_feedback(self, project_id: str, amount: int, limit: int | None) -> None:
        """Count pieces of feedback in this minute. Raises RateLimited, and counts none, beyond the project's limit."""
        if limit is not None and not await self._counter.add(f"feedback:{project_id}", amount, limit):
            message = (
                f"This project may send {limit} pieces of feedback a minute (feedback_per_minute), and {amount} more "
                "are beyond that; wait, or send smaller batches."
            )
            raise RateLimited(message, code="project_limit", retry_after=MINUTE)

    def is_throttled(self, address: str, limit: int) -> bool:
        """Whether requests with unknown keys have come too often from this address within a minute."""
        return self._unknown_keys.count(address) >= limit

    async def count_unknown_key(self, address: str, limit: int) -> None:
        await self._unknown_keys.take(address, limit)

    async def close(self) -> None:
        await self._window.close()


def _duration(seconds: float) -> str:
    """Format a duration as OpenAI does. Example: 0.25 -> "250ms", 59.2 -> "59.2s", 60.0 -> "1m0s" """
    if seconds < 1:
        return f"{math.ceil(1000 * seconds)}ms"
    minutes, rest = divmod(math.ceil(10 * seconds) / 10, 60)
    return f"{minutes:.0f}m{rest:g}s" if minutes else f"{rest:g}s"
