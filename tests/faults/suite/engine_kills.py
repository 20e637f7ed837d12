"""kill -9 of the real engine: two replicas of SGLang under their supervisors, streamed chats, and releases.

One replica is killed at a time: its main process or one of its child processes, while it works or while it restarts. A
reply that a kill interrupts may be lost, but must end with an error. Every reply's log-probs are recomputed with the
version that it names. The serving version must be loaded soon after the model.
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
from tests.benchmarks.deployment import POLICY
from tests.benchmarks.swap_deployment import SwapDeployment, run_deployment
from tests.benchmarks.swap_users import Users
from tests.benchmarks.swap_versions import UnpublishedVersion, make_versions, publish

MAX_LOAD_SECONDS = 10.0  # from the first answer of an engine until it has loaded the serving version
MAX_RESTART_SECONDS = 45.0  # from a kill until another SGLang is started, which includes noticing a hang
REPEAT_SHARE = 0.25  # the share of the kills that are followed by another kill while the engine restarts
REPEAT_SECONDS = 15.0  # the longest time between these two kills
CHILD_SHARE = 0.5  # the share of the kills that hit one child process instead of the main process
WORK_SECONDS = 4.0  # the longest time between two kills while both replicas are ready
TIMEOUT_SECONDS = 300.0
PUBLISH_SHARE = 0.2  # of the operations; the others are rollbacks and deployments
NUM_VERSIONS = 120  # created for a round; when all are published, the operations are rollbacks and deployments only


@dataclass
class EngineKillRun:
    """The results of the kills.

    For each kill that was not followed by another: which process was killed, the seconds from the kill until SGLang was
    started again (`restart`), from then until it answered (`start`), and from the kill until it was ready with the
    serving version loaded (`recovery`).
    """

    kills: Counter[str] = field(default_factory=Counter)
    victims: list[str] = field(default_factory=list)
    restart: list[float] = field(default_factory=list)
    start: list[float] = field(default_factory=list)
    recovery: list[float] = field(default_factory=list)
    replies: Counter[str] = field(default_factory=Counter)
    operations: Counter[str] = field(default_factory=Counter)
    recomputed: int = 0
    mislabelled: int = 0
    largest_distance: float = 0.0
    errors: list[str] = field(default_factory=list)

    def row(self) -> dict[str, Any]:
        return {"part": "engines", "case": f"{self.kills.total()} kills of the real engine", **vars(self)}


async def run_engine_kills(
    seed: int, count: int, seconds: float, print_line: Callable[[str], None], *, num_versions: int = NUM_VERSIONS
) -> EngineKillRun:
    """Run at most `count` kills, for about `seconds`; then check every reply and version."""
    result, ends = EngineKillRun(), time.monotonic() + seconds
    async with run_deployment("sqlite", replicas=2, apis=1) as deployment:
        folder = deployment.settings.home / "unpublished"
        unpublished = await asyncio.to_thread(make_versions, folder, DEMO_MODEL, num_versions)
        users = Users(deployment.urls, deployment.key, POLICY, 4)
        chatting = asyncio.create_task(users.chat(seed))
        releaser = Releaser(deployment, unpublished, random.Random(f"{seed}/moves"), result)
        await releaser.publish()
        releasing = asyncio.create_task(releaser.run())
        killer = Killer(deployment, random.Random(f"{seed}/kills"), result)
        while result.kills.total() < count and time.monotonic() < ends:
            try:
                await killer.kill(count)
            except TimeoutError:
                result.errors.append(f"not ready after {TIMEOUT_SECONDS:.0f} s, after {dict(result.kills)}")
                break
            print_line(f"engines: {result.kills.total()} of {count} kills, ready after {result.recovery[-1]:.1f} s")
        releaser.is_over = users.stopped = True
        for error in await asyncio.gather(releasing, chatting, return_exceptions=True):
            if error is not None:
                result.errors.append(repr(error))
        await check_replies(deployment, users, result)
    return result


@dataclass
class Killer:
    deployment: SwapDeployment
    rng: random.Random
    result: EngineKillRun

    async def kill(self, max_kills: int) -> None:
        """Kill one replica, possibly again while it restarts, and wait until it is ready."""
        number = self.rng.randrange(len(self.deployment.engines))
        await asyncio.sleep(self.rng.uniform(0, WORK_SECONDS))
        before, killed_at, victim = await self._kill_process(number, "at work")
        while self.rng.random() < REPEAT_SHARE and self.result.kills.total() < max_kills:
            await self._wait_for_restart(number, before)
            await asyncio.sleep(self.rng.uniform(0, REPEAT_SECONDS))
            before, killed_at, victim = await self._kill_process(number, "while it started")
        restart, start, recovery = await self._wait_for_recovery(number, before, killed_at)
        self.result.victims.append(victim)
        self.result.restart.append(restart)
        self.result.start.append(start)
        self.result.recovery.append(recovery)
        if restart > MAX_RESTART_SECONDS or recovery - start - restart > MAX_LOAD_SECONDS:
            times = f"restarted after {restart:.1f} s, answered {start:.1f} s later, ready at {recovery:.1f} s"
            self.result.errors.append(f"engine-{number}, {victim} killed: {times}")

    async def _kill_process(self, number: int, moment: str) -> tuple[int, float, str]:
        """Return the incarnation that was killed, the time, and which process it was."""
        incarnation = (await self._read_engine(number)).incarnation
        main = self._main_process(number)
        children = [process for process in main.children(recursive=True) if process.is_running()]
        is_child = bool(children) and self.rng.random() < CHILD_SHARE
        victim = self.rng.choice(children) if is_child else main
        os.kill(victim.pid, signal.SIGKILL)
        name = "a child process" if is_child else "the main process"
        self.result.kills[f"{moment}, {name}"] += 1
        return incarnation, time.monotonic(), name

    def _main_process(self, number: int) -> psutil.Process:
        supervisor = self.deployment.supervisors[number].process
        assert supervisor is not None
        children = psutil.Process(supervisor.pid).children()
        [main] = [child for child in children if child.pid == os.getsid(child.pid)]
        return main

    async def _wait_for_restart(self, number: int, before: int) -> None:
        """Wait until the supervisor has started another SGLang."""
        async with asyncio.timeout(TIMEOUT_SECONDS):
            while True:
                with suppress(ValueError, psutil.Error, ProcessLookupError):
                    if (await self._read_engine(number)).incarnation > before and self._main_process(
                        number
                    ).is_running():
                        return
                await asyncio.sleep(0.02)

    async def _wait_for_recovery(self, number: int, before: int, killed_at: float) -> tuple[float, float, float]:
        """Return the seconds from kill to restart, from there to the first answer, and from kill to readiness."""
        await self._wait_for_restart(number, before)
        started_at = time.monotonic()
        async with asyncio.timeout(TIMEOUT_SECONDS):
            async with httpx2.AsyncClient(
                base_url=self.deployment.engines[number], timeout=2, trust_env=False
            ) as engine:
                while not await is_answering(engine):
                    await asyncio.sleep(0.05)
            answered_at = time.monotonic()
            while not await self._is_ready(number):
                await asyncio.sleep(0.05)
        return started_at - killed_at, answered_at - started_at, time.monotonic() - killed_at

    async def _is_ready(self, number: int) -> bool:
        """Return whether the engine is ready with the serving version loaded."""
        engine = await self._read_engine(number)
        async with self.deployment.db.read() as session:
            deployment = await session.get_one(Deployment, self.deployment.policy_id)
            serving = await session.get_one(Version, deployment.version_id)
        return engine.state == EngineState.READY and serving.adapter_name in (None, *engine.loaded)

    async def _read_engine(self, number: int) -> Engine:
        async with self.deployment.db.read() as session:
            return await session.get_one(Engine, f"engine-{number}")


async def is_answering(engine: httpx2.AsyncClient) -> bool:
    try:
        return (await engine.get("/ready")).status_code == 200
    except httpx2.HTTPError:
        return False


@dataclass
class Releaser:
    """Publishes, rolls back and deploys in random order during the kills."""

    deployment: SwapDeployment
    unpublished: list[UnpublishedVersion]
    rng: random.Random
    result: EngineKillRun
    is_over: bool = False
    live_numbers: list[int] = field(default_factory=list)  # of the versions that went live, the newest last

    async def run(self) -> None:
        headers = {"authorization": f"Bearer {self.deployment.key}"}
        async with httpx2.AsyncClient(
            base_url=self.deployment.urls[0], headers=headers, timeout=60, trust_env=False
        ) as self.api:
            while not self.is_over:
                await asyncio.sleep(self.rng.uniform(0.5, 3.0))
                if self.unpublished and self.rng.random() < PUBLISH_SHARE:
                    await self.publish()
                elif len(self.live_numbers) > 1:
                    operations = ("rollback", self.live_numbers[-2]), ("deploy", self.live_numbers[-1])
                    await self._send(*self.rng.choice(operations))

    async def publish(self) -> None:
        version_id = await publish(
            self.deployment.db, self.deployment.settings, self.deployment.policy_id, self.unpublished.pop()
        )
        async with asyncio.timeout(TIMEOUT_SECONDS):
            while (version := await self._read_version(version_id)).state in (
                VersionState.TRAINED,
                VersionState.VERIFIED,
            ):
                await asyncio.sleep(0.05)
        if version.state == VersionState.LIVE:
            self.live_numbers.append(version.number)
            self.result.operations["published"] += 1
        else:  # allowed only if a kill interrupted each attempt
            self.result.operations["rejected"] += 1
            if "not verified in" not in (version.reason or ""):
                self.result.errors.append(f"v{version.number} is {version.state}: {version.reason}")

    async def _send(self, path: str, number: int) -> None:
        answer = await self.api.post(f"/v1/policies/{POLICY}/{path}", json={"version": number})
        if answer.status_code == 200:
            self.result.operations[path] += 1
        elif (code := answer.json()["error"]["code"]) == "version_not_loaded":
            self.result.operations[f"{path} refused: {code}"] += 1
        else:
            self.result.errors.append(f"{path} to v{number}: {answer.status_code} {answer.text}")

    async def _read_version(self, id: str) -> Version:
        async with self.deployment.db.read() as session:
            return await session.get_one(Version, id)


async def check_replies(deployment: SwapDeployment, users: Users, result: EngineKillRun) -> None:
    """Compare every reply that a user received with the stored turn, and recompute its log-probs."""
    async with deployment.db.read() as session:
        turns = {turn.completion_id: turn for turn in await session.scalars(select(Turn))}
        versions = list(await session.scalars(select(Version).order_by(Version.number, Version.id)))
        serving_id = (await session.get_one(Deployment, deployment.policy_id)).version_id
    labels = {version.id: f"{POLICY}@v{version.number}" for version in versions}
    for reply in users.replies:
        turn = turns.get(reply.id or "")
        if reply.failure is None:
            result.replies["complete"] += 1
            if turn is None or turn.state != TurnState.DONE or labels[turn.version_id] != reply.label:
                result.errors.append(f"{reply.id} was complete and named {reply.label}; the stored turn differs")
        elif reply.failure.startswith("reported: "):
            result.replies["cut with an error"] += 1
        elif reply.failure == "refused: 503":
            result.replies["503 before the first token"] += 1
        else:
            result.replies["cut without an error"] += 1
            result.errors.append(f"{reply.id}: {reply.failure}")
    logprobs = await check_logprobs(deployment.db, deployment.settings)
    result.recomputed, result.mislabelled = logprobs.replies, logprobs.mislabelled
    result.largest_distance = logprobs.largest_distance
    if logprobs.mislabelled:
        result.errors.append(f"{logprobs.mislabelled} replies are of another version than they name")
    if logprobs.replies < result.replies["complete"]:
        num_complete = result.replies["complete"]
        result.errors.append(f"only {logprobs.replies} of {num_complete} complete replies can be recomputed")
    live = [version.id for version in versions if version.state == VersionState.LIVE]
    if live != [serving_id]:
        names = [labels[id] for id in live]
        result.errors.append(f"live are {names}, and the deployment names {labels[serving_id]}")
