"""Open-loop load: each request is due at a moment fixed in advance, and its latency counts from there."""

import asyncio
import random
import resource
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tests.benchmarks.wire import HttpResponse, Wires

WARM_WIRES = 32


@dataclass(frozen=True, slots=True)
class Round:
    """Latencies in milliseconds. `late`: how long after its moment a request left, which is the generator's fault."""

    first: list[float]
    whole: list[float]
    late: list[float]
    errors: int
    cpu: float  # share of one core that the generator took


async def open_loop(url: str, request: bytes, rate: float, seconds: float, seed: int, ok: int = 200) -> Round:
    """Poisson arrivals. Whoever is slow meets a growing crowd, as in life: no request waits for another's answer."""
    rng, due, moments = random.Random(seed), 0.0, []
    while (due := due + rng.expovariate(rate)) < seconds:
        moments.append(due)
    first, whole, late, errors = [], [], [], 0
    spent = cpu_seconds()
    async with Wires(url) as wires:
        await wires.open(WARM_WIRES)
        start = time.perf_counter() + 0.05

        async def one(moment: float) -> None:
            nonlocal errors
            late.append(1000 * (time.perf_counter() - moment))
            try:
                response = await asyncio.wait_for(wires.ask(request), 30)
            except (OSError, TimeoutError, asyncio.IncompleteReadError):
                errors += 1
                return
            errors += response.status != ok
            first.append(1000 * (response.first_at - moment))
            whole.append(1000 * (response.last_at - moment))

        async with asyncio.TaskGroup() as group:
            for moment in moments:
                if (wait := start + moment - time.perf_counter()) > 0:
                    await asyncio.sleep(wait)
                group.create_task(one(start + moment))
    return Round(first, whole, late, errors, (cpu_seconds() - spent) / seconds)


async def closed_loop(
    url: str, make: Callable[[], bytes], connections: int, seconds: float, ok: Sequence[int]
) -> tuple[list[float], int, float]:
    """Each connection asks again as soon as it is answered: milliseconds of each, errors, and seconds in all."""
    took: list[float] = []
    errors = 0
    ends = time.perf_counter() + seconds
    async with Wires(url) as wires:
        await wires.open(connections)

        async def one() -> None:
            nonlocal errors
            while (begun := time.perf_counter()) < ends:
                response: HttpResponse = await wires.ask(make())
                took.append(1000 * (response.last_at - begun))
                errors += response.status not in ok

        begun = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for _ in range(connections):
                group.create_task(one())
    return took, errors, time.perf_counter() - begun


def cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def quantile(values: Sequence[float], share: float) -> float:
    """Nearest rank. Example: quantile(range(1, 101), 0.99) -> 99"""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, round(share * len(ordered) + 0.5) - 1))] if ordered else float("nan")
