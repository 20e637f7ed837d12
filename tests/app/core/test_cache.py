"""SingleFlightCache: shared reads, expiry, errors and invalidation."""

import asyncio

import pytest

from app.core import cache
from app.core.cache import SingleFlightCache


class Clock:
    def __init__(self) -> None:
        self.seconds = 1000.0

    def monotonic(self) -> float:
        return self.seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(cache, "time", clock)
    return clock


class Source:
    """Returns 1, 2, 3, … after `gate` is set."""

    def __init__(self) -> None:
        self.num_reads = 0
        self.gate = asyncio.Event()
        self.gate.set()

    async def read(self) -> int:
        self.num_reads += 1
        value = self.num_reads
        await self.gate.wait()
        return value


async def test_value_expires_after_its_time(clock: Clock) -> None:
    values, source = SingleFlightCache[str, int](5, max_size=10), Source()
    assert [await values.get("a", source.read) for _ in range(3)] == [1, 1, 1]
    clock.seconds += 4.9
    assert await values.get("a", source.read) == 1
    clock.seconds += 0.2
    assert await values.get("a", source.read) == 2


async def test_own_lifetime_of_a_value_shortens_its_time(clock: Clock) -> None:
    values, source = SingleFlightCache[str, int](3600, max_size=10, lifetime=lambda value: 60.0), Source()
    await values.get("a", source.read)
    clock.seconds += 61
    assert await values.get("a", source.read) == 2


async def test_time_counts_from_the_beginning_of_the_read(clock: Clock) -> None:
    values, source = SingleFlightCache[str, int](5, max_size=10), Source()
    source.gate.clear()
    reading = asyncio.create_task(values.get("a", source.read))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    clock.seconds += 6
    source.gate.set()
    assert await reading == 1
    assert await values.get("a", source.read) == 2


@pytest.mark.parametrize(("share_seconds", "expected"), [(float("inf"), [1, 1, 1]), (1.0, [1, 1, 2])])
async def test_concurrent_requests_share_a_read_that_is_young_enough(
    clock: Clock, share_seconds: float, expected: list[int]
) -> None:
    values, source = SingleFlightCache[str, int](0, max_size=10, share_seconds=share_seconds), Source()
    source.gate.clear()
    tasks = [asyncio.create_task(values.get("a", source.read)) for _ in range(2)]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    clock.seconds += 2
    tasks.append(asyncio.create_task(values.get("a", source.read)))
    await asyncio.sleep(0)
    source.gate.set()
    assert await asyncio.gather(*tasks) == expected


async def test_cancelled_request_does_not_cancel_the_read_of_others() -> None:
    values, source = SingleFlightCache[str, int](60, max_size=10), Source()
    source.gate.clear()
    tasks = [asyncio.create_task(values.get("a", source.read)) for _ in range(2)]
    await asyncio.sleep(0)
    tasks[0].cancel()
    await asyncio.sleep(0)
    source.gate.set()
    assert await tasks[1] == 1 and tasks[0].cancelled()


async def test_errors_and_misses_are_not_kept() -> None:
    values, source = SingleFlightCache[str, int](60, max_size=10), Source()

    async def fail() -> int:
        raise RuntimeError("no database")

    async def miss() -> None:
        return None

    with pytest.raises(RuntimeError):
        await values.get("a", fail)
    assert await values.get("a", miss) is None
    assert await values.get("a", source.read) == 1


async def test_forget_voids_a_read_that_is_under_way() -> None:
    values, source = SingleFlightCache[str, int](60, max_size=10), Source()
    source.gate.clear()
    reading = asyncio.create_task(values.get("a", source.read))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    values.forget()
    source.gate.set()
    assert await reading == 1
    assert await values.get("a", source.read) == 2
    assert await values.get("a", source.read) == 2
