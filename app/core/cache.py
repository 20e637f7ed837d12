"""A cache in front of the database for one process: values expire, and requests that come together share one read."""

import asyncio
import math
import time
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

from cachetools import TLRUCache

K = TypeVar("K")
V = TypeVar("V")


class SingleFlightCache(Generic[K, V]):
    """Keeps a value for at most `seconds`, counted from the beginning of its read, and no longer than its own lifetime.

    - Misses (None) and errors are not kept.
    - Requests for a key that is being read wait for that read, if it began at most `share_seconds` ago. A request that
      is cancelled does not cancel the read for the others.
    - `forget` voids what is kept, and also what is being read at that moment.
    - Time is this process's monotonic clock, so a wrong wall clock neither shortens nor stretches an entry.
    - At most `max_size` values are kept; the least recently used one goes first.

    Args:
        lifetime: Returns the seconds that a value stays valid after its read began.
    """

    def __init__(
        self,
        seconds: float,
        *,
        max_size: int,
        share_seconds: float = math.inf,
        lifetime: Callable[[V], float] = lambda value: math.inf,
    ) -> None:
        self._seconds, self._share_seconds, self._lifetime = seconds, share_seconds, lifetime
        # Values with the time at which they expire, and reads with the time at which they began.
        self._entries: TLRUCache[K, tuple[V, float]] = TLRUCache(
            max_size, ttu=lambda key, entry, now: entry[1], timer=lambda: time.monotonic()
        )
        self._reads: dict[K, tuple[asyncio.Task[V | None], float]] = {}
        self._generation = 0

    async def get(self, key: K, read: Callable[[], Awaitable[V | None]]) -> V | None:
        """Return the value of `key`, read by `read` if it is not kept. Raises what `read` raises."""
        if (entry := self._entries.get(key)) is not None:
            return entry[0]
        now = time.monotonic()
        task, began_at = self._reads.get(key, (None, -math.inf))
        if task is None or now - began_at > self._share_seconds:
            task = asyncio.create_task(self._read(key, read, now))
            self._reads[key] = task, now
            task.add_done_callback(lambda done: self._remove_read(key, done))
        return await asyncio.shield(task)

    async def _read(self, key: K, read: Callable[[], Awaitable[V | None]], began_at: float) -> V | None:
        generation = self._generation
        value = await read()
        if generation != self._generation:
            return value
        self._entries.pop(key, None)
        if value is not None:
            expires_at = began_at + min(self._seconds, self._lifetime(value))
            self._entries[key] = value, expires_at  # not kept if this time has passed already
        return value

    def _remove_read(self, key: K, task: "asyncio.Task[V | None]") -> None:
        if key in self._reads and self._reads[key][0] is task:
            del self._reads[key]

    def forget(self) -> None:
        """Drop every value, and keep no value whose read is under way."""
        self._generation += 1
        self._entries.clear()
        self._reads.clear()
