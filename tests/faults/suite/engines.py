"""kill -9 of the real engine: two replicas of SGLang under their supervisors, users who stream, versions that move.

One replica is killed at a time, the whole family or a single process of it, at work or again while it starts. A reply
that a kill cut may be lost, but must have said so. No reply may be another version's than it names: each is computed
again. What serves is held again soon after the model is there.
"""

import asyncio
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import httpx2
import psutil
from sqlalchemy import select

from app.core.settings import DEMO_MODEL
from app.models import Deployment, Engine, EngineState, Turn, TurnState, Version, VersionState
from demo.recompute_logprobs import check_logprobs
from tests.benchmarks import swap
from tests.benchmarks.deployment import POLICY
from tests.benchmarks.swap_users import Users
from tests.benchmarks.swap_versions import UnpublishedVersion, make_versions, publish

MOST_BACK_SECONDS = 10.0  # from the model's answer until what serves is held
MOST_AGAIN_SECONDS = 45.0  # from a kill until another SGLang is started: a hang is seen, and a short life waited out
AGAIN_SHARE = 0.25  # of the kills are followed by another while the engine starts,
AGAIN_SECONDS = 15.0  # so long after the first at most
ALONE_SHARE = 0.5  # of the kills meet one process of the family, and not its head
WORK_SECONDS = 4.0  # between two kills at most, when both replicas are there
PATIENCE_SECONDS = 300.0  # for anything to happen at all
PUBLISH_SHARE = 0.2  # of the moves; the others go back and forth
VERSIONS = 120  # made for a round; when they are used up, the pointer goes on moving among them


@dataclass
class Storm:
    """What happened. Of each kill that was followed by no other: what was killed, and in seconds: until its supervisor
    started `again`, SGLang's `load` until it answered, and from the kill until it was ready and held what served."""

    kills: Counter[str] = field(default_factory=Counter)
    victims: list[str] = field(default_factory=list)
    again: list[float] = field(default_factory=list)
    load: list[float] = field(default_factory=list)
    back: list[float] = field(default_factory=list)
    replies: Counter[str] = field(default_factory=Counter)
    moves: Counter[str] = field(default_factory=Counter)
    computed_again: int = 0
    another_version: int = 0
    largest_distance: float = 0.0
    wrong: list[str] = field(default_factory=list)

    def row(self) -> dict[str, Any]:
        return {"part": "engines", "case": f"{self.kills.total()} kills of the real engine", **vars(self)}


async def storm(
    seed: int, count: int, seconds: float, say: Callable[[str], None], *, versions: int = VERSIONS
) -> Storm:
    """At most so many kills, for about so long; then everything is looked through."""
    result, ends = Storm(), time.monotonic() + seconds
    async with swap.run_deployment("sqlite", replicas=2, apis=1) as there:
        made = await asyncio.to_thread(make_versions, there.settings.home / "made", DEMO_MODEL, versions)
        users = Users(there.urls, there.key, POLICY, 4)
        talking = asyncio.create_task(users.chat(seed))
        mover = Mover(there, made, random.Random(f"{seed}/moves"), result)
        await mover.publish()
        moving = asyncio.create_task(mover.run())
        killer = Killer(there, random.Random(f"{seed}/kills"), result)
        while result.kills.total() < count and time.monotonic() < ends:
            try:
                await killer.kill(count)
            except TimeoutError:
                result.wrong.append(f"not back after {PATIENCE_SECONDS:.0f} s, after {dict(result.kills)}")
                break
            say(f"engines: {result.kills.total()} of {count} kills, back after {result.back[-1]:.1f} s")
        mover.over = users.stopped = True
        for ended in await asyncio.gather(moving, talking, return_exceptions=True):
            if ended is not None:
                result.wrong.append(repr(ended))
        await look_through(there, users, result)
    return result


@dataclass
class Killer:
    there: swap.SwapDeployment
    rng: random.Random
    result: Storm

    async def kill(self, most: int) -> None:
        """One replica, once or again and again while it starts, until it is back."""
        number = self.rng.randrange(len(self.there.engines))
        await asyncio.sleep(self.rng.uniform(0, WORK_SECONDS))
        before, killed_at, victim = await self._strike(number, "at work")
        while self.rng.random() < AGAIN_SHARE and self.result.kills.total() < most:
            await self._started(number, before)
            await asyncio.sleep(self.rng.uniform(0, AGAIN_SECONDS))
            before, killed_at, victim = await self._strike(number, "while it started")
        again, load, back = await self._back(number, before, killed_at)
        self.result.victims.append(victim)
        self.result.again.append(again)
        self.result.load.append(load)
        self.result.back.append(back)
        if again > MOST_AGAIN_SECONDS or back - load - again > MOST_BACK_SECONDS:
            told = f"started again after {again:.1f} s, answered {load:.1f} s later, held it at {back:.1f} s"
            self.result.wrong.append(f"engine-{number}, {victim} killed: {told}")

    async def _strike(self, number: int, when: str) -> tuple[int, float, str]:
        """Returns the incarnation that was killed, when, and what of it."""
        incarnation = (await self._row(number)).incarnation
        head = self._head(number)
        family = [process for process in head.children(recursive=True) if process.is_running()]
        alone = bool(family) and self.rng.random() < ALONE_SHARE
        victim = self.rng.choice(family) if alone else head
        os.kill(victim.pid, signal.SIGKILL)
        what = "one of its processes" if alone else "its head"
        self.result.kills[f"{when}, {what}"] += 1
        return incarnation, time.monotonic(), what

    def _head(self, number: int) -> psutil.Process:
        supervisor = self.there.supervisors[number].process
        assert supervisor is not None
        [head] = [child for child in psutil.Process(supervisor.pid).children() if child.pid == os.getsid(child.pid)]
        return head

    async def _started(self, number: int, before: int) -> None:
        """Until its supervisor has started another SGLang."""
        async with asyncio.timeout(PATIENCE_SECONDS):
            while True:
                with suppress(ValueError, psutil.Error, ProcessLookupError):
                    if (await self._row(number)).incarnation > before and self._head(number).is_running():
                        return
                await asyncio.sleep(0.02)

    async def _back(self, number: int, before: int, killed_at: float) -> tuple[float, float, float]:
        """Seconds from the kill until it is started again, of the model's load, and until it holds what serves."""
        await self._started(number, before)
        started_at = time.monotonic()
        async with asyncio.timeout(PATIENCE_SECONDS):
            async with httpx2.AsyncClient(base_url=self.there.engines[number], timeout=2, trust_env=False) as engine:
                while not await answers(engine):
                    await asyncio.sleep(0.05)
            answered_at = time.monotonic()
            while not await self._holds(number):
                await asyncio.sleep(0.05)
        return started_at - killed_at, answered_at - started_at, time.monotonic() - killed_at

    async def _holds(self, number: int) -> bool:
        engine = await self._row(number)
        async with self.there.db.read() as session:
            pointer = await session.get_one(Deployment, self.there.policy_id)
            serving = await session.get_one(Version, pointer.version_id)
        return engine.state == EngineState.READY and serving.adapter_name in (None, *engine.loaded)

    async def _row(self, number: int) -> Engine:
        async with self.there.db.read() as session:
            return await session.get_one(Engine, f"engine-{number}")


async def answers(engine: httpx2.AsyncClient) -> bool:
    try:
        return (await engine.get("/ready")).status_code == 200
    except httpx2.HTTPError:
        return False


@dataclass
class Mover:
    """Publishes, rolls back and deploys, in no order, for as long as there are kills."""

    there: swap.SwapDeployment
    made: list[UnpublishedVersion]
    rng: random.Random
    result: Storm
    over: bool = False
    homes: list[int] = field(default_factory=list)  # numbers of the versions that went live, the newest last

    async def run(self) -> None:
        headers = {"authorization": f"Bearer {self.there.key}"}
        async with httpx2.AsyncClient(
            base_url=self.there.urls[0], headers=headers, timeout=60, trust_env=False
        ) as self.api:
            while not self.over:
                await asyncio.sleep(self.rng.uniform(0.5, 3.0))
                if self.made and self.rng.random() < PUBLISH_SHARE:
                    await self.publish()
                elif len(self.homes) > 1:
                    await self._move(*self.rng.choice((("rollback", self.homes[-2]), ("deploy", self.homes[-1]))))

    async def publish(self) -> None:
        version_id = await publish(self.there.db, self.there.settings, self.there.policy_id, self.made.pop())
        async with asyncio.timeout(PATIENCE_SECONDS):
            while (version := await self._version(version_id)).state in (VersionState.TRAINED, VersionState.VERIFIED):
                await asyncio.sleep(0.05)
        if version.state == VersionState.LIVE:
            self.homes.append(version.number)
            self.result.moves["published"] += 1
        else:  # allowed only if it met kills in all its attempts
            self.result.moves["rejected"] += 1
            if "not verified in" not in (version.reason or ""):
                self.result.wrong.append(f"v{version.number} is {version.state}: {version.reason}")

    async def _move(self, path: str, number: int) -> None:
        answer = await self.api.post(f"/v1/policies/{POLICY}/{path}", json={"version": number})
        if answer.status_code == 200:
            self.result.moves[path] += 1
        elif (code := answer.json()["error"]["code"]) == "version_not_loaded":
            self.result.moves[f"{path} refused: {code}"] += 1
        else:
            self.result.wrong.append(f"{path} to v{number}: {answer.status_code} {answer.text}")

    async def _version(self, id: str) -> Version:
        async with self.there.db.read() as session:
            return await session.get_one(Version, id)


async def look_through(there: swap.SwapDeployment, users: Users, result: Storm) -> None:
    """Every reply as its user heard it, beside what is on record, and computed again."""
    async with there.db.read() as session:
        turns = {turn.completion_id: turn for turn in await session.scalars(select(Turn))}
        versions = list(await session.scalars(select(Version)))
        pointer = await session.get_one(Deployment, there.policy_id)
    labels = {version.id: f"{POLICY}@v{version.number}" for version in versions}
    for seen in users.replies:
        turn = turns.get(seen.id or "")
        if seen.failure is None:
            result.replies["whole"] += 1
            if turn is None or turn.state != TurnState.DONE or labels[turn.version_id] != seen.label:
                result.wrong.append(f"{seen.id} was whole and named {seen.label}; on record it is not")
        elif seen.failure.startswith("reported: "):
            result.replies["cut, and told so"] += 1
        elif seen.failure == "refused: 503":
            result.replies["503 before a word"] += 1
        else:
            result.replies["cut without a word"] += 1
            result.wrong.append(f"{seen.id}: {seen.failure}")
    attested = await check_logprobs(there.db, there.settings)
    result.computed_again, result.another_version = attested.replies, attested.mislabelled
    result.largest_distance = attested.largest_distance
    if attested.mislabelled:
        result.wrong.append(f"{attested.mislabelled} replies are another version's than they name")
    if attested.replies < result.replies["whole"]:
        result.wrong.append(f"only {attested.replies} of {result.replies['whole']} whole replies can be computed again")
    live = [version.id for version in versions if version.state == VersionState.LIVE]
    if live != [pointer.version_id]:
        result.wrong.append(f"live are {[labels[id] for id in live]}, the pointer is at {labels[pointer.version_id]}")
