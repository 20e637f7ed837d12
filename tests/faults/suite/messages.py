"""Messages lost and tripled, two trainers at one batch, clocks that are wrong: rows are truth, and nothing else."""

import asyncio
import random
import signal
import time
from pathlib import Path
from typing import Any

from sqlalchemy import Engine, create_engine, select
from sqlalchemy.orm import Session

from app.models import Batch, BatchState, Feedback
from tests.faults.suite.deployment import KINDS, Deployment, small
from tests.faults.suite.kills import Storm, storm
from tests.faults.suite.load import Load
from tests.faults.suite.nursery import Nursery
from tests.faults.suite.shim import build
from tests.faults.suite.watch import Watch

Row = dict[str, Any]
HOUR = 3600
LEARNED_SECONDS = 120.0
NOBODY = "is thrown away"  # what a trainer says of work that came too late


async def lost(folder: Path, urls: dict[str, str], seed: int, seconds: float, nursery: Nursery | None = None) -> Row:
    """No nudge ever arrives but those of the sweep, which beat starts."""
    switches = {kind: {"FAULTS_RINGS": "reconcile" if kind == "worker" else "none"} for kind in KINDS}
    return row("every nudge lost", await calm(small(folder / "home", **urls), switches, seed, seconds, nursery))


async def tripled(folder: Path, urls: dict[str, str], seed: int, seconds: float, nursery: Nursery | None = None) -> Row:
    switches = {kind: {"FAULTS_RINGS": "3"} for kind in KINDS}
    return row("every message tripled", await calm(small(folder / "home", **urls), switches, seed, seconds, nursery))


async def calm(
    settings: Any, switches: dict[str, dict[str, str]], seed: int, seconds: float, nursery: Nursery | None
) -> Storm:
    """A load, and nobody is killed."""

    async def meanwhile(watch: Watch, load: Load) -> None:
        await asyncio.sleep(seconds)
        await watch.learned(LEARNED_SECONDS)

    async with Deployment(settings, switches, nursery) as deployment:
        return await storm(deployment, seed, {}, meanwhile=meanwhile)


async def two_trainers(
    folder: Path, urls: dict[str, str], seed: int, times: int, nursery: Nursery | None = None
) -> Row:
    """Of two trainers the one that holds a batch is stopped until the other has trained it, and goes on then."""
    settings = small(folder / "home", **urls)
    switches = {kind: {"FAULTS_UPDATE_SECONDS": "4"} for kind in ("trainer", "trainer-2")}
    stuck: list[str] = []

    async with Deployment(settings, switches, nursery) as deployment:

        async def meanwhile(watch: Watch, load: Load) -> None:
            rng = random.Random(seed)
            database = create_engine(deployment.settings.database.replace("+aiosqlite", ""))
            for _ in range(times):
                if (word := await late(deployment, database, rng)) is not None:
                    stuck.append(word)
            database.dispose()

        await deployment.start("trainer-2")
        result = await storm(deployment, seed, {}, meanwhile=meanwhile)
        result.stalled += stuck
        ends = time.monotonic() + 60
        while (refused := refusals(deployment, *switches)) < times and time.monotonic() < ends:
            await asyncio.sleep(0.1)  # who goes on last still finds out that it is too late
    told = row("two trainers, one stopped past its lease", result, stopped=times, refused=refused)
    if refused < times:  # more of them if the machine itself has stopped one for longer than its lease
        told["wrong"].append(f"{times} late commits, and {refused} were refused")
    return told


def refusals(deployment: Deployment, *kinds: str) -> int:
    return sum((deployment.logs / f"{kind}.log").read_text().count(NOBODY) for kind in kinds)


async def late(deployment: Deployment, database: Engine, rng: random.Random) -> str | None:
    for _ in range(5):
        batch_id, kind = await claimed(deployment, database)
        await asyncio.sleep(rng.uniform(0, 0.15))  # in the midst of its update, which takes 1.3 s at least
        deployment.signal(kind, signal.SIGSTOP)
        try:
            if await asyncio.to_thread(state, database, batch_id) != BatchState.OPEN:
                continue  # it was through with it: on a busy machine we come too late ourselves
            async with asyncio.timeout(30):
                while await asyncio.to_thread(state, database, batch_id) == BatchState.OPEN:
                    await asyncio.sleep(0.05)
            return None
        except TimeoutError:
            continue  # stopped in the midst of a beat, it has SQLite's only lock
        finally:
            deployment.signal(kind, signal.SIGCONT)
    return f"batch {batch_id} waits for a trainer that is stopped"


async def claimed(deployment: Deployment, database: Engine) -> tuple[str, str]:
    """A batch that a trainer of ours has begun, and which of them."""

    def look() -> list[tuple[str, str | None]]:
        with Session(database) as session:
            rows = session.execute(
                select(Batch.id, Batch.lease_owner).where(
                    Batch.state == BatchState.OPEN, Batch.lease_owner.is_not(None), Batch.attempt == 1
                )
            )
            return [(id, owner) for id, owner in rows]

    seen = {id for id, _ in await asyncio.to_thread(look)}  # how long these have been under way nobody knows
    async with asyncio.timeout(60):
        while True:
            kinds = {pid: kind for kind, pid in deployment.pids.items()}
            for id, owner in await asyncio.to_thread(look):
                kind = kinds.get(int((owner or ":0").rpartition(":")[2]))
                if id not in seen and kind is not None:
                    return id, kind
            await asyncio.sleep(0.02)


def state(database: Engine, batch_id: str) -> str:
    with Session(database) as session:
        return session.get_one(Batch, batch_id).state


async def clocks(folder: Path, urls: dict[str, str], seed: int, seconds: float, skew: dict[str, int]) -> Row:
    """Hosts whose wall clocks are wrong; the database's own is right."""
    settings = small(folder / "home", **urls)
    switches = {kind: {"FAULTS_SKEW": str(wrong)} for kind, wrong in skew.items()}

    async def meanwhile(watch: Watch, load: Load) -> None:
        await asyncio.sleep(seconds)

    nursery = await asyncio.to_thread(Nursery.open, build(folder))
    try:
        async with Deployment(settings, switches, nursery) as deployment:
            result = await storm(deployment, seed, {}, meanwhile=meanwhile)
            retaken, wrong = await asyncio.to_thread(order, settings.database)
    finally:
        nursery.close()
    case = "clocks: " + ", ".join(f"{kind} {wrong / HOUR:+.0f} h" for kind, wrong in skew.items())
    told = row(case, result, taken_twice=retaken)
    told["wrong"] += wrong
    return told


def order(url: str) -> tuple[int, list[str]]:
    """How many batches were taken more than once, and whatever of the feedback is out of order."""
    engine = create_engine(url)
    with Session(engine) as session:
        retaken = len(list(session.scalars(select(Batch.id).where(Batch.attempt > 1))))
        said = session.execute(select(Feedback.idempotency_key, Feedback.created_at).order_by(Feedback.seq)).all()
    engine.dispose()
    wrong = [f"{retaken} leases were lost"] if retaken else []
    latest: dict[str, int] = {}
    for key, created_at in said:
        user, _, number = key.rpartition("-")
        if int(number) < latest.get(user, 0):
            wrong.append(f"{key} was written after {user}-{latest[user]}")
        latest[user] = int(number)
        if abs(created_at - time.time()) > HOUR / 2:
            wrong.append(f"{key} bears the time of a wrong clock")
    return retaken, wrong


def row(case: str, result: Storm, **more: Any) -> Row:
    assert result.found is not None
    counts = {
        **result.found.table(),
        **{name.replace("_", " "): count for name, count in more.items()},
    }
    wrong = list(result.wrong)
    if result.found.versions == 0:
        wrong.append("nothing was learned at all")
    return {"part": "messages", "case": case, "counts": counts, "wrong": wrong}
