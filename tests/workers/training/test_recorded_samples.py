"""The replies that the KL of an update is measured on: recorded, of the policy, and not in the batch; and how many
turns of its episode go on from a turn."""

from typing import Any

import pytest

from app.models import Batch, Origin, TurnState
from tests.support.attempts import attempt
from tests.support.deployment import Harness
from tests.support.updates import claim_next_batch, rate, release, train
from workers.training import batch_claims
from workers.training.recorded_samples import read_places


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
    await batch_claims.hand_back(harness.db, ["trainer"])
    second = await batch_claims.claim(harness.db, "trainer", harness.settings)
    assert second is not None and second.batch == first.batch
    assert len(first.batch.held_out) == 1


@pytest.mark.parametrize(
    ("twin", "num_next"),
    [
        pytest.param({"request_sha256": "a"}, 1, id="a request that was sent again, and continued then"),
        pytest.param({"request_sha256": "b"}, 2, id="another request: a branch"),
        pytest.param({"state": TurnState.FAILED, "request_sha256": "b"}, 1, id="a reply that failed"),
    ],
)
async def test_repeated_request_is_no_branch(harness: Harness, twin: dict[str, Any], num_next: int) -> None:
    """The first turn is continued by one turn that goes on, and by one that does not."""
    episode = await attempt(harness, 0)
    place: dict[str, Any] = {"episode_id": episode["id"], "conversation_id": "c", "num_prompt_tokens": 3}
    first = await harness.turn(episode_step=1, **place)
    place |= {"prefix_reuse": "exact"}
    other = await harness.turn(episode_step=2, parent_id=first.id, **place, **twin)
    second = await harness.turn(episode_step=3, parent_id=first.id, request_sha256="a", **place)
    last = await harness.turn(episode_step=4, parent_id=second.id, request_sha256="c", **place)
    async with harness.db.read() as session:
        places = await read_places(session, [first, other, second, last])
    assert [places[turn.id].num_next for turn in (first, other, second, last)] == [num_next, 0, 1, 0]


async def test_twins_without_a_further_turn_both_count(harness: Harness) -> None:
    """Nobody knows which of them was taken: each ends a line."""
    episode = await attempt(harness, 0)
    place: dict[str, Any] = {"episode_id": episode["id"], "conversation_id": "c", "num_prompt_tokens": 3}
    first = await harness.turn(episode_step=1, **place)
    place |= {"prefix_reuse": "exact", "parent_id": first.id, "request_sha256": "a"}
    twins = [await harness.turn(episode_step=step, **place) for step in (2, 3)]
    async with harness.db.read() as session:
        places = await read_places(session, [first, *twins])
    assert places[first.id].num_next == 2
