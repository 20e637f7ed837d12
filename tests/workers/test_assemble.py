"""Samples → Batch: enough, fresh enough, and not all the same."""

from app.models import Audit, Batch, BatchState, Sample, SampleState, Version, VersionState
from tests.ring import Ring
from workers.assemble import assemble
from workers.curate import curate


async def rate(ring: Ring, thumbs: str, version: Version | None = None) -> None:
    """One rated turn per character: + or -."""
    for thumb in thumbs:
        turn = await ring.turn(version)
        await ring.thumb(turn.id, "up" if thumb == "+" else "down")
    await curate(ring.db)


async def test_too_few_samples_wait(ring: Ring) -> None:
    await rate(ring, "+-+-+-+")
    assert await assemble(ring.db, ring.settings) == 0
    assert await ring.all(Batch) == []


async def test_enough_samples_become_one_frozen_batch(ring: Ring) -> None:
    await rate(ring, "+-+-+-+-+-")
    assert await assemble(ring.db, ring.settings) == 1
    [batch] = await ring.all(Batch)
    assert (batch.state, batch.num_samples, batch.parent_id) == (BatchState.OPEN, 8, (await ring.serving()).id)
    states = sorted(sample.state for sample in await ring.all(Sample))
    assert states == [SampleState.BATCHED] * 8 + [SampleState.OPEN] * 2


async def test_one_batch_at_a_time(ring: Ring) -> None:
    await rate(ring, "+-" * 8)
    await assemble(ring.db, ring.settings)
    await assemble(ring.db, ring.settings)
    assert len(await ring.all(Batch)) == 1


async def test_a_batch_without_variance_is_refused_with_its_reason_on_record(ring: Ring) -> None:
    await rate(ring, "++++++++")
    await assemble(ring.db, ring.settings)
    [batch] = await ring.all(Batch)
    assert batch.state == BatchState.REFUSED
    assert "rewards are 1.0" in batch.reason
    assert {sample.state for sample in await ring.all(Sample)} == {SampleState.DROPPED}
    assert "batch refused" in [row.action for row in await ring.all(Audit)]
    await rate(ring, "+-+-+-+-")
    assert await assemble(ring.db, ring.settings) == 1, "learning goes on"


async def test_a_stale_sample_never_reaches_a_batch(ring: Ring) -> None:
    base = await ring.serving()
    await rate(ring, "+-")
    first = await ring.version(VersionState.LIVE)
    await rate(ring, "+-", first)
    second = await ring.version(VersionState.LIVE)
    await rate(ring, "+-+-+-+-", second)
    await assemble(ring.db, ring.settings)
    by_version = {(sample.version_id, sample.state) for sample in await ring.all(Sample)}
    assert (base.id, SampleState.DROPPED) in by_version, "two versions behind"
    assert (first.id, SampleState.BATCHED) in by_version, "one version behind"


async def test_a_sample_of_a_version_that_was_rolled_back_never_reaches_a_batch(ring: Ring) -> None:
    left = await ring.version(VersionState.ROLLED_BACK)
    await rate(ring, "+-", left)
    policy = await ring.policy()
    async with ring.db.write() as session:
        (await session.get_one(type(policy), policy.id)).head_version_id = left.parent_id
    await assemble(ring.db, ring.settings)
    assert {sample.state for sample in await ring.all(Sample)} == {SampleState.DROPPED}


async def test_nothing_is_assembled_on_a_head_that_has_not_come_home(ring: Ring) -> None:
    await rate(ring, "+-+-+-+-")
    await ring.version(VersionState.TRAINED)
    assert await assemble(ring.db, ring.settings) == 0
