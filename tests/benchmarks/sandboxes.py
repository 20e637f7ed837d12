"""Measure how many snippets each sandbox runs in a second: `python -m tests.benchmarks.sandboxes`. Half a minute.

Each snippet prints a sum, in a process of its own. A sandbox that is not installed is named and left out. "http" is a
service of ours with the wire of Sandbox Fusion on this machine, with bubblewrap behind it.
"""

import argparse
import asyncio
import platform
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from statistics import quantiles

from alignment.environments.errors import InfrastructureFailure
from alignment.environments.sandbox.base import Sandbox, SandboxLimits
from alignment.environments.sandbox.bubblewrap import BubblewrapSandbox
from alignment.environments.sandbox.monty import MontySandbox
from alignment.environments.sandbox.remote import RemoteSandbox
from alignment.environments.sandbox.unsafe import UnsafeSandbox
from tests.support.sandbox_service import SandboxService
from tests.support.scripted_engine import serve

CODE = "print(sum(i * i for i in range(1000)))"
ANSWER = "332833500\n"


@asynccontextmanager
async def behind_http(limits: SandboxLimits) -> AsyncIterator[Sandbox]:
    with serve(SandboxService(BubblewrapSandbox(limits))) as url:
        yield RemoteSandbox(url, limits)


@asynccontextmanager
async def closing(sandbox: Sandbox) -> AsyncIterator[Sandbox]:
    try:
        yield sandbox
    finally:
        await sandbox.close()


async def measure(sandbox: Sandbox, seconds: float, num_at_a_time: int) -> list[float]:
    """Return the seconds of each run."""
    await sandbox.run(CODE)  # the first run starts what stays
    deadline = time.perf_counter() + seconds
    durations: list[float] = []

    async def run_in_turn() -> None:
        while (started := time.perf_counter()) < deadline:
            execution = await sandbox.run(CODE)
            assert execution.stdout == ANSWER, execution
            durations.append(time.perf_counter() - started)

    await asyncio.gather(*(run_in_turn() for _ in range(num_at_a_time)))
    return durations


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=4.0, help="of each measurement")
    arguments = parser.parse_args()
    limits = SandboxLimits(seconds=20)
    sandboxes: dict[str, Callable[[], AbstractAsyncContextManager[Sandbox]]] = {
        "monty": lambda: closing(MontySandbox(limits)),
        "bubblewrap": lambda: closing(BubblewrapSandbox(limits)),
        "http": lambda: behind_http(limits),
        "unsafe": lambda: closing(UnsafeSandbox(limits)),
    }
    print(f"Python {platform.python_version()}, {limits.concurrent_runs} at a time\n")
    print("| sandbox | one at a time, per second | median | 95 % | as many as cores, per second |")
    print("|---|---|---|---|---|")
    for name, open_one in sandboxes.items():
        async with open_one() as sandbox:
            try:
                alone = await measure(sandbox, arguments.seconds, 1)
            except InfrastructureFailure as failure:
                print(f"| {name} | not run: {failure} | | | |")
                continue
            together = await measure(sandbox, arguments.seconds, limits.concurrent_runs)
            cuts = quantiles(alone, n=20)
            per_second = (len(durations) / arguments.seconds for durations in (alone, together))
            first, second = (f"{rate:,.0f}" for rate in per_second)
            print(f"| {name} | {first} | {cuts[9] * 1000:.1f} ms | {cuts[18] * 1000:.1f} ms | {second} |", flush=True)


if __name__ == "__main__":
    asyncio.run(main())
