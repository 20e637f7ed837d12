"""The replies that the KL of an update is measured on: recorded, of the policy, and not in the batch."""

from app.models import Batch, Origin, TurnState
from tests.support.deployment import Harness
from tests.support.updates import claim_next_batch, rate, release, train
from workers.training import batches


async def test_held_out_replies_are_the_newest_others_that_may_be_trained_on(harness: Harness) -> None:
    old = [(await harness.turn()).id for _ in range(2)]
    await rate(harness, "+-+-+-+-")
    await release(harness, await train(harness))
    others = [(await harness.turn()).id for _ in range(3)]
    await rate(harness, "+-+-+-+-")
    await harness.turn(exclusion_reason="greedy sampling")
    await harness.turn(origin=Origin.SHADOW)
    await harness.turn(state=TurnState.ABORTED)
    batch = (await claim_next_batch(harness)).batch
    held_out = {sample.turn_id: (sample.version, sample.lag) for sample in batch.held_out}
    assert {turn_id: held_out.get(turn_id) for turn_id in (*others, *old)} == dict.fromkeys(others, (1, 0)) | (
        dict.fromkeys(old, (0, 1))
    )
    assert len(held_out) == len(others) + len(old) + 8, "and those that the version before was trained on"
    assert not {sample.turn_id for sample in batch.samples} & held_out.keys()
    assert [version for version, _ in held_out.values()] == [1] * 3 + [0] * 10, "the newest first"


async def test_a_repeated_update_has_the_same_held_out_replies(harness: Harness) -> None:
    """Those of before the batch was frozen."""
    await harness.turn()
    await rate(harness, "+-+-+-+-")
    first = await claim_next_batch(harness)
    frozen_at = (await harness.get(Batch, first.row.id)).created_at
    await harness.turn(created_at=frozen_at - 1, finished_at=frozen_at + 1)
    await harness.turn(created_at=frozen_at + 1, finished_at=frozen_at + 2)
    await batches.hand_back(harness.db, ["trainer"])
    second = await batches.claim(harness.db, "trainer", harness.settings)
    assert second is not None and second.batch == first.batch
    assert len(first.batch.held_out) == 1
