"""kill -9 at random moments, under load: nothing acknowledged is lost, nothing is used twice, work goes on."""

import asyncio
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from tests.faults.suite.deployment import KINDS, Deployment
from tests.faults.suite.invariants import Report, check
from tests.faults.suite.load import Load
from tests.faults.suite.progress import BACKGROUND_WORK, PROGRESS, ProgressMonitor

# The maximum age of a process when it is killed: about half of the kills hit it at its start, and half at its work.
MAX_AGE_SECONDS = {
    "api": 3.0,
    "worker": 0.8,
    "judge": 0.8,
    "rollout": 0.8,
    "publisher": 1.0,
    "trainer": 1.2,
    "beat": 0.8,
    "engine": 2.0,
}
BUSY_SHARE = 0.75  # the share of the kills that wait for open work, for at most WORK_SECONDS,
WORK_SECONDS = 2.0
BUSY_SECONDS = 0.5  # and then for a random time up to this, so that most of them hit the process at its work
DRAIN_SECONDS = 90.0  # the run ends after so long without any progress
PAUSE_SECONDS = 0.1  # between a user's chats
JUDGED_PAUSE_SECONDS = 0.5  # where every reply is judged and has a group sample: the judges must be able to keep up


@dataclass
class FaultRun:
    """What happened. `recovered`: by kind, the seconds from each kill to the next finished work, if work was open.

    `deaths` counts processes that ended without a kill, `open_work` what was unfinished at the end.
    """

    kills: Counter[str] = field(default_factory=Counter)
    recovered: dict[str, list[float]] = field(default_factory=dict)
    stalled: list[str] = field(default_factory=list)
    deaths: Counter[str] = field(default_factory=Counter)
    statuses: Counter[str] = field(default_factory=Counter)
    report: Report | None = None
    open_work: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def errors(self) -> list[str]:
        assert self.report is not None
        waiting = {name: self.open_work.get(name, 0) for name in BACKGROUND_WORK}
        unfinished = [f"unfinished at the end: {waiting}"] if any(waiting.values()) else []
        return self.report.errors + self.stalled + unfinished


async def run_faults(
    deployment: Deployment,
    seed: int,
    kills: dict[str, int],
    print_line: Any = print,
    seconds: float = 10**6,
    meanwhile: Callable[[ProgressMonitor, Load], Awaitable[None]] | None = None,
    monitor_url: str | None = None,
) -> FaultRun:
    """Kill each kind so many times (or for so long), all kinds at once; then let the work finish, and check.

    `meanwhile` runs beside the kills, under the same load. `monitor_url` is the database's own URL if a proxy is in
    front of the database.
    """
    result, began = FaultRun(), time.monotonic()
    await deployment.start(*(kind for kind in reversed(KINDS) if kind not in deployment.wanted))
    await deployment.wait_until_ready()
    async with ProgressMonitor(monitor_url or deployment.settings.database) as monitor:
        pause = JUDGED_PAUSE_SECONDS if len(deployment.settings.rewards.sources) > 1 else PAUSE_SECONDS
        async with Load(deployment, seed, pause=pause) as load, asyncio.TaskGroup() as group:
            for kind, count in kills.items():
                killer = Killer(deployment, monitor, kind, random.Random(f"{seed}/{kind}"), result, print_line)
                group.create_task(killer.run(count, began + seconds))
            if meanwhile is not None:
                group.create_task(meanwhile(monitor, load))
        result.open_work = await monitor.wait_until_idle(DRAIN_SECONDS)
    deployment.wanted.clear()
    result.deaths, result.statuses = deployment.deaths, load.statuses
    settings = deployment.settings.model_copy(update={"database_url": monitor_url} if monitor_url else {})
    result.report = await asyncio.to_thread(check, settings, load.acknowledged, load.chats)
    result.report.errors += load.errors
    result.seconds = time.monotonic() - began
    return result


@dataclass
class Killer:
    """Kills the processes of one kind, one after the other."""

    deployment: Deployment
    monitor: ProgressMonitor
    kind: str
    rng: random.Random
    result: FaultRun
    print_line: Any

    async def run(self, count: int, until: float) -> None:
        recovery_times = self.result.recovered.setdefault(self.kind, [])
        while self.result.kills[self.kind] < count and time.monotonic() < until:
            await self._wait_for_age(self.rng.uniform(0, MAX_AGE_SECONDS[self.kind]))
            if self.rng.random() < BUSY_SHARE:
                await self._wait_for_work(self.rng.uniform(0, BUSY_SECONDS))
            killed_at = time.monotonic()
            if not self.deployment.kill(self.kind):
                continue  # it has just ended by itself, and is started again
            self.result.kills[self.kind] += 1
            if self.result.kills[self.kind] % 25 == 0:
                self.print_line(f"{self.kind}: {self.result.kills[self.kind]} of {count} kills")
            try:
                seconds = await self.monitor.wait_for_progress(self.kind, killed_at)
            except TimeoutError as error:
                self.result.stalled.append(str(error))
                self.print_line(f"STALLED {error}")
                continue
            if seconds is not None:
                recovery_times.append(seconds)

    async def _wait_for_age(self, age: float) -> None:
        """Wait until the process has run for `age` seconds."""
        while time.monotonic() < self.deployment.started_at[self.kind] + age or self.kind not in self.deployment.pids:
            await asyncio.sleep(0.005)

    async def _wait_for_work(self, extra_seconds: float) -> None:
        """Wait until there is open work, and then for `extra_seconds`."""
        _, waiting = PROGRESS[self.kind]
        ends = time.monotonic() + WORK_SECONDS
        while waiting is not None and not self.monitor.latest.counts[waiting] and time.monotonic() < ends:
            await asyncio.sleep(0.01)
        await asyncio.sleep(extra_seconds if waiting is not None else 0)
