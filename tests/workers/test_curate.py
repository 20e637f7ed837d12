"""Feedback → Rewards and Samples."""

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
