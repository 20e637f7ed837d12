"""Feedback → Rewards and Samples."""

import pytest

from app.models import Feedback, Reward, Sample, SampleState, Turn, TurnState
from tests.ring import Ring
from workers.curate import curate


async def test_a_thumb_becomes_a_reward_and_a_sample(ring: Ring) -> None:
    turn = await ring.turn()
    await ring.thumb(turn.id, "down", source={"kind": "HUMAN", "id": "ada"})
    assert await curate(ring.db) == 1
    [reward], [sample] = await ring.all(Reward), await ring.all(Sample)
    assert (reward.source, reward.value) == ("default/HUMAN/ada", -1.0)
    assert (sample.turn_id, sample.reward, sample.state) == (turn.id, -1.0, SampleState.OPEN)
    assert await curate(ring.db) == 0


async def test_rewards_stay_apart_by_source_and_a_sample_carries_their_mean(ring: Ring) -> None:
    turn = await ring.turn()
    await ring.thumb(turn.id, "up", source={"kind": "HUMAN", "id": "ada"})
    await ring.thumb(turn.id, "down", source={"kind": "HUMAN", "id": "bob"})
    await ring.thumb(turn.id, "down", source={"kind": "LLM_JUDGE", "id": "ada"})
    await curate(ring.db)
    assert len(await ring.all(Reward)) == 3
    [sample] = await ring.all(Sample)
    assert abs(sample.reward + 1 / 3) < 1e-9


async def test_second_thoughts_count_until_a_batch_is_frozen(ring: Ring) -> None:
    turn = await ring.turn()
    await ring.thumb(turn.id, "up")
    await curate(ring.db)
    await ring.thumb(turn.id, "down")
    await curate(ring.db)
    [sample] = await ring.all(Sample)
    assert sample.reward == -1.0
    async with ring.db.write() as session:
        (await session.get_one(Sample, turn.id)).state = SampleState.TRAINED
    await ring.thumb(turn.id, "up")
    await curate(ring.db)
    [sample] = await ring.all(Sample)
    [reward] = await ring.all(Reward)
    assert (sample.reward, reward.value) == (-1.0, 1.0)


async def test_a_thumb_that_outruns_its_stream_waits_for_the_end(ring: Ring) -> None:
    turn = await ring.turn(state=TurnState.OPEN, output_ids=None, logprobs=None)
    await ring.thumb(turn.id, "up")
    assert await curate(ring.db) == 0
    async with ring.db.write() as session:
        (await session.get_one(Turn, turn.id)).state = TurnState.DONE
    assert await curate(ring.db) == 1
    assert [row.curated for row in await ring.all(Feedback)] == [True]


async def test_a_flawed_turn_is_rewarded_but_never_learned_from(ring: Ring) -> None:
    turn = await ring.turn(flaw="3 output ids came with 2 log-probs")
    await ring.thumb(turn.id, "down")
    await curate(ring.db)
    [sample] = await ring.all(Sample)
    assert (sample.state, sample.reason) == (SampleState.DROPPED, "3 output ids came with 2 log-probs")
    assert len(await ring.all(Reward)) == 1


async def test_a_rating_counts_like_a_score(ring: Ring) -> None:
    turn = await ring.turn()
    await ring.api.post("/v1/feedback", json={"completion_id": turn.id, "kind": "rating", "value": 2})
    await curate(ring.db)
    [sample] = await ring.all(Sample)
    assert sample.reward == -0.5  # a quarter of the way from 1 to 5


async def test_words_without_a_number_are_read_once_and_make_no_reward(ring: Ring) -> None:
    a, b = [await ring.turn(conversation_id="c") for _ in range(2)]
    for body in (
        {"completion_id": a.id, "kind": "comment", "value": "thanks"},
        {"completion_id": a.id, "kind": "correction", "value": "better"},
        {"completion_id": a.id, "kind": "categorical", "value": "greeting"},
        {"kind": "comparison", "value": [a.id, b.id]},
        {"kind": "score", "value": 1, "target": {"conversation_id": "c"}},
    ):
        assert (await ring.api.post("/v1/feedback", json=body)).status_code == 201
    assert await curate(ring.db) == 3  # those on a turn; the others were never waiting
    assert await ring.all(Reward) == await ring.all(Sample) == []
    assert all(row.curated for row in await ring.all(Feedback))


async def test_a_row_without_a_turn_does_not_ring_for_ever(ring: Ring) -> None:
    turn = await ring.turn(conversation_id="c")
    await ring.api.post("/v1/feedback", json={"kind": "score", "value": 1, "target": {"conversation_id": "c"}})
    async with ring.db.write() as session:
        (await session.get_one(Feedback, 1)).curated = False
    await ring.thumb(turn.id)
    assert await curate(ring.db) == 2
    assert await curate(ring.db) == 0


async def say(ring: Ring, turn: Turn, value: str, who: str = "ada") -> str:
    said: str = (await ring.thumb(turn.id, value, source={"id": who})).json()["id"]
    await curate(ring.db)
    return said


async def take_back(ring: Ring, said: str) -> None:
    assert (await ring.api.delete(f"/v1/feedback/{said}")).json()["withdrawn"] is True
    await curate(ring.db)


async def test_what_is_withdrawn_no_longer_weighs(ring: Ring) -> None:
    turn = await ring.turn()
    said = await say(ring, turn, "up")
    await say(ring, turn, "down", who="bob")
    await take_back(ring, said)
    [reward], [sample] = await ring.all(Reward), await ring.all(Sample)
    assert (reward.source, sample.reward, sample.state) == ("default/HUMAN/bob", -1.0, SampleState.OPEN)


async def test_a_sample_of_which_nothing_is_left_is_dropped_until_something_is_said_again(ring: Ring) -> None:
    turn = await ring.turn()
    said = await say(ring, turn, "up")
    await take_back(ring, said)
    [sample] = await ring.all(Sample)
    assert (sample.state, sample.reason) == (SampleState.DROPPED, "withdrawn")
    assert await ring.all(Reward) == []
    await say(ring, turn, "down", who="bob")
    [sample] = await ring.all(Sample)
    assert (sample.state, sample.reason, sample.reward) == (SampleState.OPEN, None, -1.0)


async def test_a_withdrawal_before_anybody_looked_leaves_no_sample(ring: Ring) -> None:
    turn = await ring.turn()
    said = (await ring.thumb(turn.id)).json()["id"]
    await take_back(ring, said)
    assert await ring.all(Reward) == await ring.all(Sample) == []


@pytest.mark.parametrize(
    ("state", "reason"), [(SampleState.TRAINED, None), (SampleState.BATCHED, None), (SampleState.DROPPED, "stale")]
)
async def test_a_sample_that_has_gone_on_is_left_where_it_is(ring: Ring, state: str, reason: str | None) -> None:
    turn = await ring.turn()
    said = await say(ring, turn, "up")
    async with ring.db.write() as session:
        sample = await session.get_one(Sample, turn.id)
        sample.state, sample.reason = state, reason
    await take_back(ring, said)
    await say(ring, turn, "down")
    [sample] = await ring.all(Sample)
    assert (sample.state, sample.reason, sample.reward) == (state, reason, 1.0)


async def test_taking_a_comment_back_does_not_take_the_thumb_back(ring: Ring) -> None:
    turn = await ring.turn()
    await say(ring, turn, "up")
    body = {"completion_id": turn.id, "kind": "comment", "value": "nice", "source": {"id": "ada"}}
    comment = (await ring.api.post("/v1/feedback", json=body)).json()["id"]
    await take_back(ring, comment)
    [reward], [sample] = await ring.all(Reward), await ring.all(Sample)
    assert (reward.value, sample.state) == (1.0, SampleState.OPEN)
    assert all(row.curated for row in await ring.all(Feedback))
