"""kill -9 at random moments, under load: nothing acknowledged is lost, nothing is used twice, work goes on."""

import asyncio
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from tests.faults.suite.deployment import KINDS, Deployment
from tests.faults.suite.invariants import Found, check
from tests.faults.suite.load import Load
from tests.faults.suite.watch import PROGRESS, Watch

# How old a process may become: about half of the kills meet it at its start, and half at its work.
WINDOW_SECONDS = {
    "api": 3.0,
    "worker": 0.8,
    "judge": 0.8,
    "rollout": 0.8,
    "publisher": 1.0,
    "trainer": 1.2,
    "beat": 0.8,
    "engine": 2.0,
}
BUSY_SHARE = 0.75  # of the kills wait for work to be there, and so long at most,
BUSY_SECONDS = 0.5  # so that most meet the process in its midst
WORK_SECONDS = 2.0
DRAIN_SECONDS = 90.0  # without anything moving
PAUSE = 0.1  # between a user's chats,
JUDGED_PAUSE = (
    0.5  # where every reply is judged and has a group sample: what nobody can keep up with would prove nothing
)


@dataclass
class Storm:
    """What happened. `recovered`: by kind, seconds from each kill to the next settled work, where there was work."""

    kills: Counter[str] = field(default_factory=Counter)
    recovered: dict[str, list[float]] = field(default_factory=dict)
    stalled: list[str] = field(default_factory=list)
    deaths: Counter[str] = field(default_factory=Counter)
    statuses: Counter[str] = field(default_factory=Counter)
    found: Found | None = None
    left: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def wrong(self) -> list[str]:
        assert self.found is not None
        waits = {name: self.left.get(name, 0) for name in ("unprocessed", "asked", "planned", "batches", "coming")}
        stuck = [f"left waiting at the end: {waits}"] if any(waits.values()) else []
        return self.found.wrong + self.stalled + stuck


async def storm(
    deployment: Deployment,
    seed: int,
    kills: dict[str, int],
    say: Any = print,
    seconds: float = 10**6,
    meanwhile: Callable[[Watch, Load], Awaitable[None]] | None = None,
    look_at: str | None = None,
) -> Storm:
    """Kill each kind so many times (or for so long), all kinds at once; then let everything settle, and look.

    `meanwhile` runs beside the kills, under the same load. `look_at`: the database's own URL, where a proxy stands
    before it.
    """
    result, began = Storm(), time.monotonic()
    await deployment.start(*(kind for kind in reversed(KINDS) if kind not in deployment.wanted))
    await deployment.ready()
    async with Watch(look_at or deployment.settings.database) as watch:
        pause = JUDGED_PAUSE if len(deployment.settings.rewards.sources) > 1 else PAUSE
        async with Load(deployment, seed, pause=pause) as load, asyncio.TaskGroup() as group:
            for kind, count in kills.items():
                killer = Killer(deployment, watch, kind, random.Random(f"{seed}/{kind}"), result, say)
                group.create_task(killer.run(count, began + seconds))
            if meanwhile is not None:
                group.create_task(meanwhile(watch, load))
        result.left = await watch.idle(DRAIN_SECONDS)
    deployment.wanted.clear()
    result.deaths, result.statuses = deployment.deaths, load.statuses
    settings = deployment.settings.model_copy(update={"database_url": look_at} if look_at else {})
    result.found = await asyncio.to_thread(check, settings, load.acked, load.chats)
    result.found.wrong += load.wrong
    result.seconds = time.monotonic() - began
    return result


@dataclass
class Killer:
    deployment: Deployment
    watch: Watch
    kind: str
    rng: random.Random
    result: Storm
    say: Any

    async def run(self, count: int, until: float) -> None:
        took = self.result.recovered.setdefault(self.kind, [])
        while self.result.kills[self.kind] < count and time.monotonic() < until:
            await self._grown(self.rng.uniform(0, WINDOW_SECONDS[self.kind]))
            if self.rng.random() < BUSY_SHARE:
                await self._busy(self.rng.uniform(0, BUSY_SECONDS))
            at = time.monotonic()
            if not self.deployment.kill(self.kind):
                continue  # it ended by itself a moment ago, and comes again
            self.result.kills[self.kind] += 1
            if self.result.kills[self.kind] % 25 == 0:
                self.say(f"{self.kind}: {self.result.kills[self.kind]} of {count} kills")
            try:
                seconds = await self.watch.progress(self.kind, at)
            except TimeoutError as stalled:
                self.result.stalled.append(str(stalled))
                self.say(f"STALLED {stalled}")
                continue
            if seconds is not None:
                took.append(seconds)

    async def _grown(self, age: float) -> None:
        """Until the process is so old: a moment of its start, its work or its rest."""
        while time.monotonic() < self.deployment.started_at[self.kind] + age or self.kind not in self.deployment.pids:
            await asyncio.sleep(0.005)

    async def _busy(self, more: float) -> None:
        _, waiting = PROGRESS[self.kind]
        ends = time.monotonic() + WORK_SECONDS
        while waiting is not None and not self.watch.latest.counts[waiting] and time.monotonic() < ends:
            await asyncio.sleep(0.01)
        await asyncio.sleep(more if waiting is not None else 0)
