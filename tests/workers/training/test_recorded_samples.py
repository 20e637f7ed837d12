"""The replies that the KL of an update is measured on: of its parent, recorded, and not in the batch."""

from app.models import Origin
from tests.support.deployment import Harness
from tests.support.updates import claim_next_batch, rate


async def test_held_out_replies_are_others_of_the_parent_that_may_be_trained_on(harness: Harness) -> None:
    await rate(harness, "+-+-+-+-")
    others = [(await harness.turn()).id for _ in range(3)]
    await harness.turn(exclusion_reason="greedy sampling")
    await harness.turn(origin=Origin.SHADOW)
    batch = (await claim_next_batch(harness)).batch
    assert {sample.turn_id for sample in batch.held_out} == set(others)
    assert {(sample.version, sample.lag) for sample in batch.held_out} == {(batch.samples[0].version, 0)}
    assert not {sample.turn_id for sample in batch.samples} & set(others)
