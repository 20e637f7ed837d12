"""Concurrent publish, deploy, rollback and canary operations end as if they had run one after the other."""

import asyncio
import os
from collections.abc import AsyncIterator
from itertools import product

import pytest

from app.core.database import Database
from app.core.settings import Settings
from app.models import Audit, AuditAction, Deployment, Engine, Version, VersionState
from tests.faults.interleavings import Process, check_invariants, run_interleaved, run_process, run_serially
from tests.support.deployment import Harness
from tests.support.scripted_engine import ScriptedEngine
from tests.workers.release.test_publish import create_trained_version
from workers.release.evaluate import evaluate
from workers.release.publish import publish

FULL = os.environ.get("ATTUNE_FULL") == "1"
ROUNDS = 200 if FULL else 20
TRAINED, VERIFIED, CANARY = VersionState.TRAINED, VersionState.VERIFIED, VersionState.CANARY
TO_OLDER_VERSION = ("roll back", "roll back to v0", "deploy v1")
OPERATIONS = {  # by the state of the newest version
    TRAINED: ("evaluate", *TO_OLDER_VERSION),
    VERIFIED: ("publish", *TO_OLDER_VERSION),
    CANARY: (*TO_OLDER_VERSION, "start v1 as a canary", "promote the canary", "abort the canary"),
}
ALL = [(newest, *pair) for newest, names in OPERATIONS.items() for pair in product(names, names)]
QUICK = [
    (TRAINED, "evaluate", "evaluate"),
    (TRAINED, "evaluate", "roll back"),
    (TRAINED, "roll back", "evaluate"),
    (TRAINED, "evaluate", "deploy v1"),
    (VERIFIED, "publish", "publish"),
    (VERIFIED, "publish", "roll back"),
    (VERIFIED, "roll back", "publish"),
    (VERIFIED, "roll back", "deploy v1"),
    (VERIFIED, "deploy v1", "roll back"),
    (CANARY, "promote the canary", "roll back"),
    (CANARY, "abort the canary", "deploy v1"),
]
pytestmark = pytest.mark.timeout(600)


@pytest.fixture
def settings(settings: Settings) -> Settings:
    """Return settings with leases that do not expire during a pause."""
    return settings.replace({"workers.lease_seconds": 60.0})


@pytest.fixture
async def processes(harness: Harness, scripted: ScriptedEngine) -> AsyncIterator[tuple[Process, Process]]:
    settings, key = harness.settings, harness.key
    async with run_process(settings, key) as first, run_process(settings, key) as second:
        yield first, second


@pytest.mark.parametrize(("newest", "first", "second"), ALL if FULL else QUICK)
async def test_concurrent_operations_are_serializable(
    harness: Harness, processes: tuple[Process, Process], newest: VersionState, first: str, second: str
) -> None:
    one, other = (processes[0], first), (processes[1], second)
    serial = await run_serially(harness, newest, [one, other])
    reverse = await run_serially(harness, newest, [other, one])
    reverse["answers"] = {0: reverse["answers"][1], 1: reverse["answers"][0]}
    at, counts = 1, [0, 0]
    while True:
        state, statements = await run_interleaved(harness, newest, one, other, at)
        if len(statements) < at:
            break
        where = f"{second!r} before {statements[at - 1]!r}, statement {at} of {first!r}"
        check_invariants(state)
        assert state in (serial, reverse), where
        counts[state == reverse] += 1
        at += 1
    name = f"{first} / {second} on {harness.db.engine.dialect.name}"
    print(f"\n{name}: {at - 1} interleavings, {counts[0]} as first then second")
    assert at > 5, "the first operation has statements to pause before"


async def test_two_publishers_deploy_a_version_once(harness: Harness, scripted: ScriptedEngine) -> None:
    """Two evaluators, then two publishers, with separate connections, start at the same time."""
    dbs = [Database(harness.settings.database_url) for _ in range(2)]
    for number in range(1, ROUNDS + 1):
        version = await create_trained_version(harness, number)
        if number % 2:
            counts = await asyncio.gather(
                *(evaluate(db, harness.settings, f"worker-{at}") for at, db in enumerate(dbs))
            )
            requests = [body for body in scripted.requests if f"shop-v{number}" in body["lora_path"]]
            assert len(requests) == 1, "scored once"
        else:
            async with harness.db.write() as session:
                (await session.get_one(Version, version.id)).state = VersionState.VERIFIED
                engine = await session.get_one(Engine, "engine-0")
                engine.loaded = [*engine.loaded, f"shop-v{number}"]
            counts = await asyncio.gather(*(publish(db, harness.settings) for db in dbs))
        assert sum(counts) == 1
        released: Version = await harness.get(Version, version.id)
        assert (released.state, released.lease_owner, released.fence) == (VersionState.LIVE, None, number % 2)
        deployment: Deployment = await harness.get(Deployment, released.policy_id)
        assert (deployment.version_id, deployment.epoch) == (version.id, number)
    deploys = sorted(
        (row.seq, row.subject) for row in await harness.all(Audit) if row.action == AuditAction.DEPLOYMENT_DEPLOYED
    )
    assert [subject for _, subject in deploys] == [f"shop@v{number}" for number in range(1, ROUNDS + 1)]
    for db in dbs:
        await db.close()
