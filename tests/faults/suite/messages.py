"""Lost and tripled messages, two trainers with one batch, wrong clocks: results depend on the database rows only."""

import asyncio
import random
import signal
import time
from pathlib import Path
from typing import Any

from sqlalchemy import Engine, create_engine, select
from sqlalchemy.orm import Session

from app.core.settings import Settings
from app.models import Batch, BatchState, Feedback
from tests.faults.suite.deployment import KINDS, Deployment, make_settings
from tests.faults.suite.fork_server_client import ForkServerClient
from tests.faults.suite.kills import FaultRun, run_faults
from tests.faults.suite.load import Load
from tests.faults.suite.progress import ProgressMonitor
from tests.faults.suite.shim import build

Row = dict[str, Any]
HOUR = 3600
VERSION_SECONDS = 120.0
LATE_RESULT = "is discarded"  # the trainer logs this for a result that it may no longer commit


async def lose_messages(
    folder: Path, urls: dict[str, Any], seed: int, seconds: float, fork_server: ForkServerClient | None = None
) -> Row:
    """Drop every message except those of the reconciler, which beat starts."""
    switches = {kind: {"FAULTS_MESSAGES": "reconcile" if kind == "worker" else "none"} for kind in KINDS}
    settings = make_settings(folder / "home", **urls)
    return make_row("every message lost", await run_load(settings, switches, seed, seconds, fork_server))


async def triple_messages(
    folder: Path, urls: dict[str, Any], seed: int, seconds: float, fork_server: ForkServerClient | None = None
) -> Row:
    """Send every message three times."""
    switches = {kind: {"FAULTS_MESSAGES": "3"} for kind in KINDS}
    settings = make_settings(folder / "home", **urls)
    return make_row("every message tripled", await run_load(settings, switches, seed, seconds, fork_server))


async def run_load(
    settings: Settings,
    switches: dict[str, dict[str, str]],
    seed: int,
    seconds: float,
    fork_server: ForkServerClient | None,
) -> FaultRun:
    """Run the load without kills."""

    async def meanwhile(monitor: ProgressMonitor, load: Load) -> None:
        await asyncio.sleep(seconds)
        await monitor.wait_for_version(VERSION_SECONDS)

    async with Deployment(settings, switches, fork_server) as deployment:
        return await run_faults(deployment, seed, {}, meanwhile=meanwhile)


async def stop_a_trainer(
    folder: Path, urls: dict[str, Any], seed: int, times: int, fork_server: ForkServerClient | None = None
) -> Row:
    """Stop the one of two trainers that holds a batch until the other has trained it, and then let it continue."""
    settings = make_settings(folder / "home", **urls)
    switches = {kind: {"FAULTS_UPDATE_SECONDS": "4"} for kind in ("trainer", "trainer-2")}
    errors: list[str] = []

    async with Deployment(settings, switches, fork_server) as deployment:

        async def meanwhile(monitor: ProgressMonitor, load: Load) -> None:
            rng = random.Random(seed)
            database = create_engine(deployment.settings.database_url.replace("+aiosqlite", ""))
            for _ in range(times):
                if (error := await stop_past_lease(deployment, database, rng)) is not None:
                    errors.append(error)
            database.dispose()

        await deployment.start("trainer-2")
        result = await run_faults(deployment, seed, {}, meanwhile=meanwhile)
        result.stalled += errors
        ends = time.monotonic() + 60
        while (refused := count_late_results(deployment, *switches)) < times and time.monotonic() < ends:
            await asyncio.sleep(0.1)  # the last trainer may not have noticed yet that its result is late
    row = make_row("two trainers, one stopped past its lease", result, stopped=times, refused=refused)
    if refused < times:  # more are possible: on a loaded machine a trainer may pause for longer than its lease
        row["errors"].append(f"{times} late commits, and {refused} were refused")
    return row


def count_late_results(deployment: Deployment, *kinds: str) -> int:
    return sum((deployment.logs / f"{kind}.log").read_text().count(LATE_RESULT) for kind in kinds)


async def stop_past_lease(deployment: Deployment, database: Engine, rng: random.Random) -> str | None:
    """Stop the trainer of a batch until the other one has finished the batch. Return an error, or None."""
    for _ in range(5):
        batch_id, kind = await wait_for_claim(deployment, database)
        await asyncio.sleep(rng.uniform(0, 0.15))  # an update takes 1.3 s at least
        deployment.signal(kind, signal.SIGSTOP)
        try:
            if await asyncio.to_thread(read_state, database, batch_id) != BatchState.OPEN:
                continue  # it has finished: on a loaded machine the signal may come too late
            async with asyncio.timeout(30):
                while await asyncio.to_thread(read_state, database, batch_id) == BatchState.OPEN:
                    await asyncio.sleep(0.05)
            return None
        except TimeoutError:
            continue  # it was stopped while it renewed its lease, and holds SQLite's write lock
        finally:
            deployment.signal(kind, signal.SIGCONT)
    return f"batch {batch_id} waits for a stopped trainer"


async def wait_for_claim(deployment: Deployment, database: Engine) -> tuple[str, str]:
    """Wait until a trainer claims a batch. Return the batch and the trainer's kind."""

    def read_claims() -> list[tuple[str, str | None]]:
        with Session(database) as session:
            rows = session.execute(
                select(Batch.id, Batch.lease_owner)
                .where(Batch.state == BatchState.OPEN, Batch.lease_owner.is_not(None), Batch.attempt == 1)
                .order_by(Batch.created_at, Batch.id)
            )
            return [(id, owner) for id, owner in rows]

    earlier = {
        id for id, _ in await asyncio.to_thread(read_claims)
    }  # the updates of these batches may be almost finished
    async with asyncio.timeout(60):
        while True:
            kinds = {pid: kind for kind, pid in deployment.pids.items()}
            for id, owner in await asyncio.to_thread(read_claims):
                kind = kinds.get(int((owner or ":0").rpartition(":")[2]))
                if id not in earlier and kind is not None:
                    return id, kind
            await asyncio.sleep(0.02)


def read_state(database: Engine, batch_id: str) -> str:
    with Session(database) as session:
        return session.get_one(Batch, batch_id).state


async def skew_clocks(folder: Path, urls: dict[str, Any], seed: int, seconds: float, skew: dict[str, int]) -> Row:
    """Shift the wall clocks of some processes; the database's clock is correct."""
    settings = make_settings(folder / "home", **urls)
    switches = {kind: {"FAULTS_SKEW": str(error)} for kind, error in skew.items()}

    async def meanwhile(monitor: ProgressMonitor, load: Load) -> None:
        await asyncio.sleep(seconds)

    fork_server = await asyncio.to_thread(ForkServerClient.open, build(folder))
    try:
        async with Deployment(settings, switches, fork_server) as deployment:
            result = await run_faults(deployment, seed, {}, meanwhile=meanwhile)
            reclaimed, errors = await asyncio.to_thread(check_times, settings.database_url)
    finally:
        fork_server.close()
    case = "clocks: " + ", ".join(f"{kind} {error / HOUR:+.0f} h" for kind, error in skew.items())
    row = make_row(case, result, claimed_twice=reclaimed)
    row["errors"] += errors
    return row


def check_times(url: str) -> tuple[int, list[str]]:
    """Return how many batches were claimed more than once, and errors in the order and times of the feedback."""
    engine = create_engine(url)
    with Session(engine) as session:
        reclaimed = len(list(session.scalars(select(Batch.id).where(Batch.attempt > 1))))
        feedback = session.execute(select(Feedback.idempotency_key, Feedback.created_at).order_by(Feedback.seq)).all()
    engine.dispose()
    errors = [f"{reclaimed} leases were lost"] if reclaimed else []
    latest: dict[str, int] = {}
    for key, created_at in feedback:
        user, _, number = key.rpartition("-")
        if int(number) < latest.get(user, 0):
            errors.append(f"{key} was written after {user}-{latest[user]}")
        latest[user] = int(number)
        if abs(created_at - time.time()) > HOUR / 2:
            errors.append(f"{key} has the time of a wrong clock")
    return reclaimed, errors


def make_row(case: str, result: FaultRun, **counts: Any) -> Row:
    assert result.report is not None
    named_counts = {name.replace("_", " "): count for name, count in counts.items()}
    errors = list(result.errors)
    if result.report.versions == 0:
        errors.append("no version was trained")
    return {"part": "messages", "case": case, "counts": result.report.table() | named_counts, "errors": errors}
