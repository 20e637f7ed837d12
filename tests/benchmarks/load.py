"""Load generators. In the open loop each request has a fixed start time, and latency counts from there."""

import asyncio
import random
import resource
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tests.benchmarks.http_client import ConnectionPool, HttpResponse

INITIAL_CONNECTIONS = 32


@dataclass(frozen=True, slots=True)
class Round:
    """Milliseconds to the first token and to the last byte. `late`: the delay of the generator before each request."""

    first_token: list[float]
    last_byte: list[float]
    late: list[float]
    errors: int
    cpu: float  # the generator's share of one core


async def open_loop(url: str, request: bytes, rate: float, seconds: float, seed: int, ok: int = 200) -> Round:
    """Send requests with Poisson arrivals. No request waits for the response to another, so they can queue."""
    rng, due, start_times = random.Random(seed), 0.0, []
    while (due := due + rng.expovariate(rate)) < seconds:
        start_times.append(due)
    first_token, last_byte, late, errors = [], [], [], 0
    cpu_before = cpu_seconds()
    async with ConnectionPool(url) as pool:
        await pool.open(INITIAL_CONNECTIONS)
        start = time.perf_counter() + 0.05

        async def send_at(start_at: float) -> None:
            nonlocal errors
            late.append(1000 * (time.perf_counter() - start_at))
            try:
                response = await asyncio.wait_for(pool.request(request), 30)
            except (OSError, TimeoutError, asyncio.IncompleteReadError):
                errors += 1
                return
            errors += response.status != ok
            first_token.append(1000 * (response.first_at - start_at))
            last_byte.append(1000 * (response.last_at - start_at))

        async with asyncio.TaskGroup() as group:
            for start_at in start_times:
                if (wait := start + start_at - time.perf_counter()) > 0:
                    await asyncio.sleep(wait)
                group.create_task(send_at(start + start_at))
    return Round(first_token, last_byte, late, errors, (cpu_seconds() - cpu_before) / seconds)


async def closed_loop(
    url: str, make: Callable[[], bytes], connections: int, seconds: float, ok: Sequence[int]
) -> tuple[list[float], int, float]:
    """Send the next request on each connection as soon as the previous response is complete.

    Return the milliseconds of each request, the number of errors, and the duration in seconds.
    """
    latencies: list[float] = []
    errors = 0
    deadline = time.perf_counter() + seconds
    async with ConnectionPool(url) as pool:
        await pool.open(connections)

        async def send_repeatedly() -> None:
            nonlocal errors
            while (start_time := time.perf_counter()) < deadline:
                response: HttpResponse = await pool.request(make())
                latencies.append(1000 * (response.last_at - start_time))
                errors += response.status not in ok

        start_time = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for _ in range(connections):
                group.create_task(send_repeatedly())
    return latencies, errors, time.perf_counter() - start_time


def cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def quantile(values: Sequence[float], share: float) -> float:
    """Return the quantile by nearest rank. Example: quantile(range(1, 101), 0.99) -> 99"""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, round(share * len(ordered) + 0.5) - 1))] if ordered else float("nan")
