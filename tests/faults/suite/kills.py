"""kill -9 at random moments under load: no acknowledged feedback is lost, no sample is used twice, work continues."""

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from tests.faults.suite.deployment import KINDS, Deployment
from tests.faults.suite.invariants import Report, check
from tests.faults.suite.load import Load
from tests.faults.suite.progress import BACKGROUND_WORK, PROGRESS, ProgressMonitor

# The maximum age of a process when it is killed: about half of the kills come while it starts, and half while it works.
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
WORKING_SHARE = 0.75  # the share of the kills that wait until there is open work, so that the process is working
MAX_WAIT_SECONDS = 2.0  # the longest wait for open work
MAX_WORK_SECONDS = 0.5  # the longest time from there until the kill
DRAIN_SECONDS = 90.0  # the run ends after this time without any progress
PAUSE_SECONDS = 0.1  # between a user's chats
JUDGED_PAUSE_SECONDS = 0.5  # where every reply is judged and has a group sample: the judges must be able to keep up


@dataclass
class FaultRun:
    """The results of a run.

    `recovered`: by kind, the seconds from each kill to the next finished work, if work was open. `deaths`: how many
    processes ended without a kill. `open_work`: the counts of unfinished work at the end.
    """

    kills: Counter[str] = field(default_factory=Counter)
    recovered: dict[str, list[float]] = field(default_factory=dict)
    stalled: list[str] = field(default_factory=list)
    deaths: Counter[str] = field(default_factory=Counter)
    statuses: Counter[str] = field(default_factory=Counter)
    streams: Counter[str] = field(default_factory=Counter)
    report: Report | None = None
    open_work: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def errors(self) -> list[str]:
        assert self.report is not None
        counts = {name: self.open_work.get(name, 0) for name in (*BACKGROUND_WORK, "open_chats")}
        unfinished = [f"unfinished at the end: {counts}"] if any(counts.values()) else []
        return self.report.errors + self.stalled + unfinished


async def run_faults(
    deployment: Deployment,
    seed: int,
    kills: dict[str, int],
    print_line: Any = print,
    seconds: float = 10**6,
    meanwhile: Callable[[ProgressMonitor, Load], Coroutine[Any, Any, None]] | None = None,
    monitor_url: str | None = None,
) -> FaultRun:
    """Kill processes of all kinds concurrently, then wait until the work is finished, and check the invariants.

    `kills` are the counts by kind; no kill begins after `seconds`. `meanwhile` runs concurrently with the kills, under
    the same load. `monitor_url` is the database's own URL if a proxy is in front of the database.
    """
    result, began = FaultRun(), time.monotonic()
    await deployment.start(*(kind for kind in reversed(KINDS) if kind not in deployment.desired_kinds))
    await deployment.wait_until_ready()
    async with ProgressMonitor(monitor_url or deployment.settings.database_url) as monitor:
        pause = JUDGED_PAUSE_SECONDS if len(deployment.settings.rewards.sources) > 1 else PAUSE_SECONDS
        async with Load(deployment, seed, pause=pause) as load, asyncio.TaskGroup() as group:
            for kind, count in kills.items():
                killer = Killer(deployment, monitor, kind, random.Random(f"{seed}/{kind}"), result, print_line)
                group.create_task(killer.run(count, began + seconds))
            if meanwhile is not None:
                group.create_task(meanwhile(monitor, load))
        result.open_work = await monitor.wait_until_idle(DRAIN_SECONDS)
    deployment.desired_kinds.clear()
    result.deaths, result.statuses, result.streams = deployment.deaths, load.statuses, load.streams
    settings = deployment.settings.replace({"database.url": monitor_url} if monitor_url else {})
    result.report = await asyncio.to_thread(check, settings, load.acknowledged, load.chats)
    result.report.errors += load.errors
    result.seconds = time.monotonic() - began
    return result


@dataclass
class Killer:
    """Kills the process of one kind repeatedly."""

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
            if self.rng.random() < WORKING_SHARE:
                await self._wait_for_work(self.rng.uniform(0, MAX_WORK_SECONDS))
            killed_at = time.monotonic()
            if not self.deployment.kill(self.kind):
                continue  # it has just ended without a kill, and is being restarted
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
        _, open_work = PROGRESS[self.kind]
        ends = time.monotonic() + MAX_WAIT_SECONDS
        while open_work is not None and not self.monitor.latest.counts[open_work] and time.monotonic() < ends:
            await asyncio.sleep(0.01)
        await asyncio.sleep(extra_seconds if open_work is not None else 0)
