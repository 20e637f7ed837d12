"""A batch at the trainer: one owner at a time, one result, and no result from a lease that was lost."""

import asyncio
from pathlib import Path

import pytest

from app.models import Batch, BatchState, Policy, Sample, SampleState, Version, VersionState
from app.models.lease import LeaseLost
from tests.ring import Ring
from tests.workers.test_assemble import rate
from workers import batches
from workers.assemble import assemble

RESULT = {
    "path": Path("/nowhere/shop-v1"),
    "manifest_sha256": "0" * 64,
    "probe": {"ids": [[1, 2]], "logprobs": [[-0.5]]},
    "metrics": {},
    "timings": {"export": 0.01},
}


async def frozen(ring: Ring) -> batches.Claimed:
    await rate(ring, "+-+-+-+-")
    await assemble(ring.db, ring.settings)
    claimed = await batches.claim(ring.db, "trainer-a", ring.settings)
    assert claimed is not None
    return claimed


async def test_a_claimed_batch_carries_the_tokens_that_were_recorded(ring: Ring) -> None:
    claimed = await frozen(ring)
    sample = claimed.batch.samples[0]
    assert (sample.prompt_ids, sample.output_ids, sample.logprobs) == ((1, 2, 3), (4, 5), (-0.5, -0.25))
    policy = await ring.policy()
    assert (claimed.number, claimed.adapter_name, claimed.parent_path) == (1, f"shop-{policy.id[-6:]}-v1", None)


async def test_a_batch_has_one_owner_while_its_lease_runs(ring: Ring) -> None:
    claimed = await frozen(ring)
    assert await batches.claim(ring.db, "trainer-b", ring.settings) is None
    await asyncio.sleep(ring.settings.lease_seconds + 0.2)
    again = await batches.claim(ring.db, "trainer-b", ring.settings)
    assert again is not None and (again.batch, again.attempt, again.fence) == (claimed.batch, 2, claimed.fence + 1)


async def test_version_and_batch_are_committed_together(ring: Ring) -> None:
    claimed = await frozen(ring)
    assert await batches.commit(ring.db, claimed, **RESULT)
    [batch] = await ring.all(Batch)
    version = await ring.get(Version, batch.version_id)
    policy = await ring.policy()
    assert (batch.state, version.state, version.number) == (BatchState.TRAINED, VersionState.TRAINED, 1)
    assert policy.head_version_id == version.id
    assert {sample.state for sample in await ring.all(Sample)} == {SampleState.TRAINED}


async def test_a_trainer_whose_lease_was_taken_writes_nothing(ring: Ring) -> None:
    late = await frozen(ring)
    await asyncio.sleep(ring.settings.lease_seconds + 0.2)
    winner = await batches.claim(ring.db, "trainer-b", ring.settings)
    assert winner is not None
    with pytest.raises(LeaseLost):
        await batches.commit(ring.db, late, **RESULT)
    assert [version.number for version in await ring.all(Version)] == [0]
    assert (await ring.policy()).head_version_id == winner.parent_id
    assert await batches.commit(ring.db, winner, **RESULT)
    assert len(await ring.all(Version)) == 2


async def test_an_update_is_void_when_a_rollback_moved_the_head_meanwhile(ring: Ring) -> None:
    claimed = await frozen(ring)
    other = await ring.version(VersionState.LIVE)
    assert not await batches.commit(ring.db, claimed, **RESULT)
    [batch] = await ring.all(Batch)
    assert batch.state == BatchState.FAILED and "head" in batch.reason
    assert (await ring.policy()).head_version_id == other.id


async def test_a_batch_that_takes_the_trainer_down_is_set_aside_after_three_attempts(ring: Ring) -> None:
    await frozen(ring)
    for _ in range(ring.settings.max_attempts - 1):
        await asyncio.sleep(ring.settings.lease_seconds + 0.2)
        assert await batches.claim(ring.db, "trainer-b", ring.settings) is not None
    await asyncio.sleep(ring.settings.lease_seconds + 0.2)
    assert await batches.claim(ring.db, "trainer-b", ring.settings) is None
    assert await batches.quarantine_poisoned(ring.db, ring.settings) == 1
    [batch] = await ring.all(Batch)
    assert batch.state == BatchState.QUARANTINED
    await rate(ring, "+-+-+-+-")
    assert await assemble(ring.db, ring.settings) == 1, "learning goes on"


async def test_a_refused_update_is_on_record_and_frees_the_line(ring: Ring) -> None:
    claimed = await frozen(ring)
    await batches.quarantine(ring.db, claimed, "NonFiniteUpdate: the gradient is not finite")
    [batch] = await ring.all(Batch)
    assert (batch.state, batch.reason) == (BatchState.QUARANTINED, "NonFiniteUpdate: the gradient is not finite")
    policy: Policy = await ring.policy()
    assert policy.head_version_id == claimed.parent_id
