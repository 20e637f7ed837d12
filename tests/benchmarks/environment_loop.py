"""Measure our loop of environments on a scripted engine: `python -m tests.benchmarks.environment_loop`. A minute.

The world answers at once, so what is measured is the loop and the API. CPU time is that of each process, per turn.
"""

import argparse
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass

import psutil
import uvloop

from alignment.environments.environment_run import EnvironmentRun
from alignment.environments.episode_loop import LoopEnvironment
from alignment.environments.protocols import Message, Observation, Step, Steps, Task
from alignment.environments.run_plan import RunPlan
from alignment.environments.run_summary import RunSummary
from alignment.environments.service_client import ServiceClient
from alignment.environments.service_http import ServiceHttp
from alignment.environments.worlds import StepsWorld
from tests.benchmarks.deployment import DATABASES, POLICY, Deployment, deployment, machine, scripted_process
from tests.benchmarks.http_client import post
from tests.benchmarks.load import closed_loop

FIRST: Message = {"role": "user", "content": "Guess a number from 1 to 20."}
NEXT: Message = {"role": "user", "content": "It is another one."}


class Guessing(Steps):
    """A game that ends after so many turns, with an outcome that depends on nothing."""

    def __init__(self, num_turns: int) -> None:
        self._num_turns = num_turns
        self._turn = 0

    def tasks(self, split: str, seed: int) -> Iterator[Task]:
        number = 0
        while True:
            yield Task(f"{split}-{number}")
            number += 1

    async def reset(self, task: Task) -> Observation:
        return Observation([FIRST])

    async def step(self, reply: Message) -> Step:
        self._turn += 1
        return Step([NEXT], 0.5, terminated=self._turn == self._num_turns)


@dataclass(frozen=True)
class CpuSeconds:
    """CPU time of this process, and of the API with the processes that it has started."""

    loop: float
    api: float

    @classmethod
    def read(cls, api: psutil.Process) -> "CpuSeconds":
        return cls(*(_cpu_seconds(process) for process in (psutil.Process(), api)))


def _cpu_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


async def play(target: Deployment, plan: RunPlan, num_turns: int) -> tuple[RunSummary, CpuSeconds]:
    """Play a run. Return its summary, and the CPU time that it has cost."""
    http = ServiceHttp(connections=plan.concurrency + 8)
    environment = LoopEnvironment(lambda: StepsWorld(Guessing(num_turns)), http)
    api = psutil.Process(target.api_pid)
    try:
        before = CpuSeconds.read(api)
        summary = await EnvironmentRun(environment, ServiceClient(target.url, target.key, http), plan).run()
        after = CpuSeconds.read(api)
    finally:
        await http.close()
    return summary, CpuSeconds(after.loop - before.loop, after.api - before.api)


async def measure_chats(target: Deployment, concurrency: int, seconds: float) -> str:
    """Return a row for plain chats, which no episode has."""
    chat = post(target.url, "/v1/chat/completions", {"model": POLICY, "messages": [FIRST]}, target.headers)
    api = psutil.Process(target.api_pid)
    before = CpuSeconds.read(api)
    latencies, errors, duration = await closed_loop(target.url, lambda: chat, concurrency, seconds, (200,))
    after = CpuSeconds.read(api)
    return _row("plain chats", len(latencies), duration, before, after) + f" {errors} |"


def _row(what: str, num_turns: int, seconds: float, before: CpuSeconds, after: CpuSeconds) -> str:
    loop, api = (1000 * value / num_turns for value in (after.loop - before.loop, after.api - before.api))
    return f"| {what} | {num_turns / seconds:,.0f} | {loop:.2f} ms | {api:.2f} ms |"


async def run(arguments: argparse.Namespace) -> None:
    print(f"{machine()}\n{arguments.concurrency} attempts at a time, groups of {arguments.group}\n")
    for kind in arguments.databases:
        with scripted_process() as engine:
            async with deployment(kind, engine) as target:
                print(f"{kind}\n\n| what | turns per second | CPU of the loop, per turn | CPU of the API | errors |")
                print("|---|---|---|---|---|")
                await measure_chats(target, arguments.concurrency, 1)  # imports, pools, statement caches
                print(await measure_chats(target, arguments.concurrency, arguments.seconds), flush=True)
                for num_turns in arguments.turns:
                    await measure_episodes(target, arguments, num_turns)
                print()


async def measure_episodes(target: Deployment, arguments: argparse.Namespace, num_turns: int) -> None:
    """Print a row for episodes with so many turns."""
    num_tasks = max(1, round(arguments.attempts / arguments.group))
    name = f"bench-{num_turns}-{os.getpid()}-{time.time():.0f}"
    plan = RunPlan(name, POLICY, num_tasks, arguments.group, arguments.concurrency)
    summary, cpu = await play(target, plan, num_turns)
    errors = sum(summary.errors.values())
    row = _row(f"episodes of {num_turns} turns", summary.num_turns, summary.seconds, CpuSeconds(0, 0), cpu)
    print(f"{row} {errors} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, nargs="+", default=[1, 8, 32], help="of an episode")
    parser.add_argument("--attempts", type=int, default=128)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=5, help="of the plain chats")
    parser.add_argument("--databases", nargs="+", choices=DATABASES, default=list(DATABASES))
    uvloop.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
