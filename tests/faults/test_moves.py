"""Concurrent publish, deploy, rollback and canary operations end as if they had run one after the other."""

import asyncio
import os
from collections.abc import AsyncIterator
from itertools import product

import pytest

from app.core.database import Database
from app.core.settings import Settings
from app.models import Audit, AuditAction, Deployment, Engine, Version, VersionState
from tests.faults.moves import Side, keeps_the_rules, meeting, one_after_the_other, side
from tests.support.deployment import Harness
from tests.support.scripted_engine import ScriptedEngine
from tests.workers.release.test_publish import create_trained_version
from workers.release.evaluate import evaluate
from workers.release.publish import publish

FULL = os.environ.get("ATTUNE_FULL") == "1"
ROUNDS = 200 if FULL else 20
NEW, VERIFIED, OUT = VersionState.TRAINED, VersionState.VERIFIED, VersionState.CANARY
BACK = ("roll back", "roll back to v0", "deploy v1")
MEETINGS = {
    NEW: ("bring home", *BACK),
    VERIFIED: ("publish", *BACK),
    OUT: (*BACK, "v1 as a canary", "promote", "end"),
}
ALL = [(newest, *pair) for newest, moves in MEETINGS.items() for pair in product(moves, moves)]
QUICK = [
    (NEW, "bring home", "bring home"),
    (NEW, "bring home", "roll back"),
    (NEW, "roll back", "bring home"),
    (NEW, "bring home", "deploy v1"),
    (VERIFIED, "publish", "publish"),
    (VERIFIED, "publish", "roll back"),
    (VERIFIED, "roll back", "publish"),
    (VERIFIED, "roll back", "deploy v1"),
    (VERIFIED, "deploy v1", "roll back"),
    (OUT, "promote", "roll back"),
    (OUT, "end", "deploy v1"),
]
pytestmark = pytest.mark.timeout(600)


@pytest.fixture
def settings(settings: Settings) -> Settings:
    """Leases that nobody outsits while he is stopped."""
    return settings.model_copy(update={"lease_seconds": 60.0})


@pytest.fixture
async def sides(harness: Harness, scripted: ScriptedEngine) -> AsyncIterator[tuple[Side, Side]]:
    async with side(harness.settings, harness.key) as one, side(harness.settings, harness.key) as other:
        yield one, other


@pytest.mark.parametrize(("newest", "first", "second"), ALL if FULL else QUICK)
async def test_concurrent_operations_are_serializable(
    harness: Harness, sides: tuple[Side, Side], newest: VersionState, first: str, second: str
) -> None:
    one, other = (sides[0], first), (sides[1], second)
    serial = await one_after_the_other(harness, newest, [one, other])
    turned = await one_after_the_other(harness, newest, [other, one])
    turned["told"] = {0: turned["told"][1], 1: turned["told"][0]}
    at, ends = 1, [0, 0]
    while True:
        found, passed = await meeting(harness, newest, one, other, at)
        if len(passed) < at:
            break
        where = f"{second!r} before {passed[at - 1]!r}, point {at} of {first!r}"
        keeps_the_rules(found)
        assert found in (serial, turned), where
        ends[found == turned] += 1
        at += 1
    print(
        f"\n{first} / {second} on {harness.db.engine.dialect.name}: {at - 1} meetings, {ends[0]} as first then second"
    )
    assert at > 5, "there were points to meet at"


async def test_two_publishers_deploy_a_version_once(harness: Harness, scripted: ScriptedEngine) -> None:
    """Two evaluators, then two publishers, with connections of their own, set off at the same moment."""
    dbs = [Database(harness.settings.database) for _ in range(2)]
    for number in range(1, ROUNDS + 1):
        version = await create_trained_version(harness, number)
        if number % 2:
            sums = await asyncio.gather(*(evaluate(db, harness.settings, f"worker-{at}") for at, db in enumerate(dbs)))
            asked = [body for body in scripted.requests if f"shop-v{number}" in body["lora_path"]]
            assert len(asked) == 1, "scored once"
        else:
            async with harness.db.write() as session:
                (await session.get_one(Version, version.id)).state = VersionState.VERIFIED
                engine = await session.get_one(Engine, "engine-0")
                engine.loaded = [*engine.loaded, f"shop-v{number}"]
            sums = await asyncio.gather(*(publish(db, harness.settings) for db in dbs))
        assert sum(sums) == 1
        home: Version = await harness.get(Version, version.id)
        assert (home.state, home.lease_owner, home.fence) == (VersionState.LIVE, None, number % 2)
        deployment: Deployment = await harness.get(Deployment, home.policy_id)
        assert (deployment.version_id, deployment.epoch) == (version.id, number)
    deploys = sorted(
        (row.seq, row.subject) for row in await harness.all(Audit) if row.action == AuditAction.DEPLOYMENT_DEPLOYED
    )
    assert [subject for _, subject in deploys] == [f"shop@v{number}" for number in range(1, ROUNDS + 1)]
    for db in dbs:
        await db.close()
