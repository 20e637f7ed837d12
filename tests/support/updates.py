"""Runs assembling, training and releasing on the database alone: no trainer and no engine takes part."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from sqlalchemy import update

from alignment.types import UpdateReport
from app.deployments import service
from app.models import Batch, Engine, Sample, Version
from app.policies.locks import lock_policy
from app.policies.service import Attribution
from app.training import line_moves
from tests.support.deployment import Harness
from tests.support.settings import by_path
from tests.support.trained_versions import create_version
from workers.curate import curate
from workers.training import batch_claims, batches
from workers.training.assemble import assemble
from workers.training.results import ComparedProbe, TrainedVersion, UpdateTimings

REPORT = UpdateReport("batch-of-a-test", updates=1, metrics={})
TRAINED = TrainedVersion(
    directory=Path("/nowhere/shop"),
    manifest_sha256="0" * 64,
    is_full_weights=False,
    probe=ComparedProbe(ids=((1, 2),), logprobs=((-0.5,),), parent_logprobs=((-0.5,),)),
    report=REPORT,
    timings=UpdateTimings(restore=0.0, update=0.0, export=0.01),
)
PROGRAM = {"kind": "CODE", "id": "ci"}
BY_TEST = Attribution("test", "test")


def trained_without(**report: Any) -> TrainedVersion:
    """Return the result of an update that has not used all of its batch: fields of its report."""
    return replace(TRAINED, report=replace(REPORT, **report))


async def rate(
    harness: Harness, thumbs: str, version: Version | None = None, rater: str | None = None, **values: Any
) -> list[str]:
    """Create one rated turn per character, + or -. Each turn has a different rater unless `rater` is given."""
    turns = []
    for thumb in thumbs:
        turn = await harness.turn(version, **values)
        turns.append(turn.id)
        source = {} if rater is None else {"source": {"kind": "HUMAN", "id": rater}}
        await harness.vote(turn.id, "up" if thumb == "+" else "down", **source)
    await curate(harness.db, harness.settings)
    return turns


async def claim_next_batch(harness: Harness, **settings: Any) -> batch_claims.ClaimedBatch:
    """Curate, assemble and claim the next batch."""
    configured = harness.settings.replace(by_path(settings))
    await curate(harness.db, configured)
    assert await assemble(harness.db, configured) == 1
    claimed = await batch_claims.claim(harness.db, "trainer", configured)
    assert claimed is not None
    return claimed


async def train(harness: Harness, **settings: Any) -> Version:
    """Assemble the next batch, and commit the version that it is trained to."""
    claimed = await claim_next_batch(harness, **settings)
    assert await batches.commit(harness.db, claimed, TRAINED)
    version: Version = await harness.get(Version, (await harness.get(Batch, claimed.row.id)).version_id)
    return version


async def release(harness: Harness, version: Version) -> Version:
    """Make the version live. The engine engine-0 has loaded it."""
    async with harness.db.write() as session:
        locked = await lock_policy(session, version.policy_id)
        row = await session.get_one(Version, version.id)
        engine = await session.get_one(Engine, "engine-0")
        engine.loaded = [*engine.loaded, row.adapter_name or ""]
        await service.set_live(locked, row, BY_TEST)
    released: Version = await harness.get(Version, version.id)
    return released


async def reject(harness: Harness, version: Version, reason: str = "its KL is too high") -> None:
    async with harness.db.write() as session:
        locked = await lock_policy(session, version.policy_id)
        row = await session.get_one(Version, version.id)
        await service.reject_version(locked, row, actor="test", reason=reason)


async def roll_back(harness: Harness, number: int | None = None) -> None:
    async with harness.db.write() as session:
        await service.roll_back(await lock_policy(session, (await harness.policy()).id), number, BY_TEST)


async def deploy(harness: Harness, number: int) -> None:
    async with harness.db.write() as session:
        await service.deploy(await lock_policy(session, (await harness.policy()).id), number, BY_TEST)


async def train_versions(harness: Harness, number: int) -> list[Version]:
    """Train versions one after the other, each on two replies that a program has judged; the last one serves."""
    versions = []
    for _ in range(number):
        turns = [await harness.turn() for _ in range(2)]
        for turn, value in zip(turns, ("up", "down"), strict=True):
            assert (await harness.vote(turn.id, value, source=PROGRAM)).status_code == 201
        await curate(harness.db, harness.settings)
        versions.append(await create_version(harness, *turns, number=len(await harness.all(Version))))
    await release(harness, versions[-1])
    return versions


async def make_steps(harness: Harness, count: int) -> int:
    """Make at most so many steps of the moves of the policy's samples. Return how many were made."""
    policy = await harness.policy()
    for number in range(count):
        async with harness.db.read() as session:
            step = await line_moves.plan_step(session, policy.id)
        if step is None:
            return number
        async with harness.db.write() as session:
            await line_moves.make_step(await lock_policy(session, policy.id), step)
    return count


async def finish_moves(harness: Harness) -> int:
    """Make all steps. Return how many there were."""
    return await make_steps(harness, 1000)


async def expire_leases(harness: Harness) -> None:
    """Let the leases of all batches expire."""
    async with harness.db.write() as session:
        await session.execute(update(Batch).where(Batch.lease_until.is_not(None)).values(lease_until=0.0))


async def samples_by_turn(harness: Harness) -> dict[str, Sample]:
    return {sample.turn_id: sample for sample in await harness.all(Sample)}
