"""Feedback → Rewards and Samples."""

from collections.abc import Sequence
from typing import Any

import pytest
from sqlalchemy import select, update
from sqlalchemy.ext.asyncio import AsyncSession

from alignment.config.rewards import RewardsConfig
from app.models import Audit, Feedback, Judgement, Policy, Reward, Sample, SampleState, Turn, TurnState
from app.projects.bootstrap import first_policy
from tests.support.deployment import Ring
from workers.feedback import signals
from workers.feedback.curate import curate, note, reconsider


async def test_a_thumb_becomes_a_reward_and_a_sample(ring: Ring) -> None:
    turn = await ring.turn()
    await ring.thumb(turn.id, "down", source={"kind": "HUMAN", "id": "ada"})
    assert await curate(ring.db, ring.settings) == 1
    [reward], [sample] = await ring.all(Reward), await ring.all(Sample)
    assert (reward.source, reward.value) == ("default/HUMAN/ada", -1.0)
    assert (sample.turn_id, sample.reward, sample.state) == (turn.id, -1.0, SampleState.OPEN)
    assert await curate(ring.db, ring.settings) == 0


async def test_rewards_stay_apart_by_source_and_a_sample_carries_their_mean(ring: Ring) -> None:
    turn = await ring.turn()
    await ring.thumb(turn.id, "up", source={"kind": "HUMAN", "id": "ada"})
    await ring.thumb(turn.id, "down", source={"kind": "HUMAN", "id": "bob"})
    await ring.thumb(turn.id, "down", source={"kind": "LLM_JUDGE", "id": "ada"})
    await curate(ring.db, ring.settings)
    assert len(await ring.all(Reward)) == 3
    [sample] = await ring.all(Sample)
    assert abs(sample.reward + 1 / 3) < 1e-9


async def test_second_thoughts_count_until_a_batch_is_frozen(ring: Ring) -> None:
    turn = await ring.turn()
    await ring.thumb(turn.id, "up")
    await curate(ring.db, ring.settings)
    await ring.thumb(turn.id, "down")
    await curate(ring.db, ring.settings)
    [sample] = await ring.all(Sample)
    assert sample.reward == -1.0
    async with ring.db.write() as session:
        (await session.get_one(Sample, turn.id)).state = SampleState.TRAINED
    await ring.thumb(turn.id, "up")
    await curate(ring.db, ring.settings)
    [sample] = await ring.all(Sample)
    [reward] = await ring.all(Reward)
    assert (sample.reward, reward.value) == (-1.0, 1.0)


async def test_a_thumb_that_outruns_its_stream_waits_for_the_end(ring: Ring) -> None:
    turn = await ring.turn(state=TurnState.OPEN, output_ids=None, logprobs=None)
    await ring.thumb(turn.id, "up")
    assert await curate(ring.db, ring.settings) == 0
    async with ring.db.write() as session:
        (await session.get_one(Turn, turn.id)).state = TurnState.DONE
    assert await curate(ring.db, ring.settings) == 1
    assert [row.curated for row in await ring.all(Feedback)] == [True]


async def test_a_flawed_turn_is_rewarded_but_never_learned_from(ring: Ring) -> None:
    turn = await ring.turn(flaw="3 output ids came with 2 log-probs")
    await ring.thumb(turn.id, "down")
    await curate(ring.db, ring.settings)
    [sample] = await ring.all(Sample)
    assert (sample.state, sample.reason) == (SampleState.DROPPED, "3 output ids came with 2 log-probs")
    assert len(await ring.all(Reward)) == 1


async def test_a_rating_counts_like_a_score(ring: Ring) -> None:
    turn = await ring.turn()
    await ring.api.post("/v1/feedback", json={"completion_id": turn.id, "kind": "rating", "value": 2})
    await curate(ring.db, ring.settings)
    [sample] = await ring.all(Sample)
    assert sample.reward == -0.5  # a quarter of the way from 1 to 5


async def test_words_without_a_number_are_read_once_and_make_no_reward(ring: Ring) -> None:
    turn = await ring.turn(conversation_id="c")
    for body in (
        {"completion_id": turn.id, "kind": "comment", "value": "thanks"},
        {"completion_id": turn.id, "kind": "categorical", "value": "greeting"},
        {"kind": "comment", "value": "thanks", "target": {"conversation_id": "c"}},
    ):
        assert (await ring.api.post("/v1/feedback", json=body)).status_code == 201
    assert await curate(ring.db, ring.settings) == 2  # those on a turn; the other was never waiting
    assert await ring.all(Reward) == await ring.all(Sample) == []
    assert all(row.curated for row in await ring.all(Feedback))


async def rewards(ring: Ring) -> dict[tuple[str, str], float]:
    return {(row.turn_id, row.source): row.value for row in await ring.all(Reward)}


async def test_a_correction_and_a_label_are_worth_what_the_policy_says(ring: Ring) -> None:
    turn = await ring.turn()
    explicit = {"type": "explicit", "correction": -0.25, "labels": {"rude": -1.0}}
    settings = ring.settings.model_copy(update={"rewards": RewardsConfig.model_validate({"sources": [explicit]})})
    for kind, value in (("correction", "better"), ("categorical", "rude")):
        body = {"completion_id": turn.id, "kind": kind, "value": value, "source": {"id": "ada"}}
        assert (await ring.api.post("/v1/feedback", json=body)).status_code == 201
    await curate(ring.db, settings)
    assert await rewards(ring) == {
        (turn.id, "correction/default/HUMAN/ada"): -0.25,
        (turn.id, "categorical/default/HUMAN/ada"): -1.0,
    }
    [sample] = await ring.all(Sample)
    assert sample.reward == -0.625


async def test_a_word_about_a_conversation_falls_on_its_turns(ring: Ring) -> None:
    a, b = [await ring.turn(conversation_id="c") for _ in range(2)]
    await ring.turn(conversation_id="another")
    body = {"kind": "score", "value": 0.5, "target": {"conversation_id": "c"}, "source": {"id": "ada"}}
    said = (await ring.api.post("/v1/feedback", json=body)).json()["id"]
    assert await curate(ring.db, ring.settings) == 1
    name = "conversation/default/HUMAN/ada"
    assert await rewards(ring) == {(a.id, name): 0.5, (b.id, name): 0.5}
    assert {sample.rater for sample in await ring.all(Sample)} == {"HUMAN/ada"}
    await take_back(ring, said)
    assert await rewards(ring) == {}
    assert {sample.state for sample in await ring.all(Sample)} == {SampleState.DROPPED}


async def test_a_comparison_is_a_reward_for_both_and_a_group_where_the_prompt_is_the_same(ring: Ring) -> None:
    a, b = await ring.turn(), await ring.turn()
    other = await ring.turn(prompt_ids=[7, 8])
    await ring.api.post("/v1/feedback", json={"kind": "comparison", "value": [b.id, a.id], "source": {"id": "ada"}})
    body = {"kind": "ranking", "value": [other.id, [a.id, b.id]], "source": {"id": "bob"}}
    said = (await ring.api.post("/v1/feedback", json=body)).json()["id"]
    await curate(ring.db, ring.settings)
    samples = {sample.turn_id: sample for sample in await ring.all(Sample)}
    assert {id: sample.reward for id, sample in samples.items()} == {a.id: -1.0, b.id: 0.0, other.id: 1.0}
    assert samples[a.id].group_id == samples[b.id].group_id and samples[a.id].group_id
    assert samples[other.id].group_id == other.id, "it answers another prompt"
    await take_back(ring, said)
    samples = {sample.turn_id: sample for sample in await ring.all(Sample)}
    assert (samples[b.id].reward, samples[other.id].state) == (1.0, SampleState.DROPPED)


async def test_credit_reaches_the_replies_before(ring: Ring) -> None:
    first = await ring.turn(conversation_id="c")
    second = await ring.turn(conversation_id="c", parent_id=first.id)
    third = await ring.turn(conversation_id="c", parent_id=second.id)
    settings = ring.settings.model_copy(update={"rewards": RewardsConfig(discount=0.5)})
    await ring.thumb(second.id, "up")
    await curate(ring.db, settings)
    await ring.thumb(third.id, "down")
    await curate(ring.db, settings)
    worth = {sample.turn_id: sample.reward for sample in await ring.all(Sample)}
    assert worth == {first.id: 0.25, second.id: 0.5, third.id: -1.0}


async def test_a_sample_ripens_when_its_sources_have_spoken_or_are_no_longer_waited_for(ring: Ring) -> None:
    sources = [{"type": "explicit"}, {"type": "next_turn", "window_seconds": 100}]
    config = RewardsConfig.model_validate({"sources": sources})
    settings = ring.settings.model_copy(update={"rewards": config})
    turn = await ring.turn(finished_at=1e9)
    await ring.thumb(turn.id, "up")
    await curate(ring.db, settings)
    [sample] = await ring.all(Sample)
    assert sample.matures_at == 1e9 + 100
    async with ring.db.write() as session:
        await note(session, turn.id, "next_turn", -1.0)
        await reconsider(session, {turn.id}, settings)
    [sample] = await ring.all(Sample)
    assert sample.matures_at > 1e9 + 100, "ripe from now on"
    assert sample.reward == pytest.approx((1.0 - 0.5 * 0.25) / (1 + 0.5 * 0.25)), "the machine counts less"


async def test_sources_are_asked_once_about_each_turn_that_ended(ring: Ring) -> None:
    sources = [
        {"type": "explicit"},
        {"type": "next_turn"},
        {"type": "rule", "name": "ended", "function": "ended"},
    ]
    settings = ring.settings.model_copy(update={"rewards": RewardsConfig.model_validate({"sources": sources})})
    first = await ring.turn(conversation_id="c")
    second = await ring.turn(conversation_id="c", parent_id=first.id, state=TurnState.ABORTED, flaw="cut")
    await ring.turn(state=TurnState.OPEN)
    await ring.turn(flaw="no consent to train")
    await curate(ring.db, settings)
    await curate(ring.db, settings)
    asked = sorted((row.turn_id, row.source) for row in await ring.all(Judgement))
    assert asked == sorted([(first.id, "ended"), (first.id, "next_turn"), (second.id, "ended")])
    async with ring.db.write() as session:
        await session.execute(update(Turn).values(curated=False))
    await curate(ring.db, settings)
    assert len(await ring.all(Judgement)) == 3


async def test_a_row_without_a_turn_does_not_ring_for_ever(ring: Ring) -> None:
    turn = await ring.turn(conversation_id="c")
    await ring.api.post("/v1/feedback", json={"kind": "score", "value": 1, "target": {"conversation_id": "c"}})
    async with ring.db.write() as session:
        (await session.get_one(Feedback, 1)).curated = False
    await ring.thumb(turn.id)
    assert await curate(ring.db, ring.settings) == 2
    assert await curate(ring.db, ring.settings) == 0


async def say(ring: Ring, turn: Turn, value: str, who: str = "ada") -> str:
    said: str = (await ring.thumb(turn.id, value, source={"id": who})).json()["id"]
    await curate(ring.db, ring.settings)
    return said


async def take_back(ring: Ring, said: str) -> None:
    assert (await ring.api.delete(f"/v1/feedback/{said}")).json()["withdrawn"] is True
    await curate(ring.db, ring.settings)


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


async def test_a_deleted_turn_is_never_opened_again(ring: Ring) -> None:
    turn = await ring.turn(conversation_id="c")
    await take_back(ring, await say(ring, turn, "up"))
    assert (await ring.api.delete(f"/v1/chat/completions/{turn.id}")).status_code == 200
    await ring.turn(conversation_id="c")
    body = {"kind": "score", "value": 1, "target": {"conversation_id": "c"}, "source": {"id": "ada"}}
    assert (await ring.api.post("/v1/feedback", json=body)).status_code == 201
    await curate(ring.db, ring.settings)
    assert (await ring.get(Sample, turn.id)).state == SampleState.DROPPED


async def test_a_conversation_may_go_from_one_policy_to_another(ring: Ring) -> None:
    first, later = await ring.turn(conversation_id="c"), await ring.turn(conversation_id="c")
    async with ring.db.write() as session:
        await first_policy(session, first.project_id, "second", ring.settings.model)
        second = (await session.scalars(select(Policy).where(Policy.name == "second"))).one()
        moved = await session.get_one(Turn, later.id)
        moved.policy_id, moved.version_id = second.id, second.head_version_id or ""
    body = {"kind": "score", "value": 0.5, "target": {"conversation_id": "c"}, "source": {"id": "ada"}}
    await ring.api.post("/v1/feedback", json=body)
    await curate(ring.db, ring.settings)
    await say(ring, later, "up", who="bob")
    assert len(await ring.all(Reward)) == 3


async def test_what_nothing_can_be_made_of_is_set_aside_and_the_rest_is_read(
    ring: Ring, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad, good = await ring.turn(), await ring.turn()
    for turn in (bad, good):
        await ring.thumb(turn.id, "up")
    spoken = signals.spoken

    async def breaks(session: AsyncSession, judged: Sequence[signals.Judged], *rest: Any) -> signals.Said:
        if bad.id in {turn.id for turn in judged}:
            raise KeyError("what nobody thought of")
        return await spoken(session, judged, *rest)

    monkeypatch.setattr(signals, "spoken", breaks)
    await curate(ring.db, ring.settings)
    assert [sample.turn_id for sample in await ring.all(Sample)] == [good.id]
    assert all(row.curated for row in await ring.all(Feedback))
    [aside] = [row for row in await ring.all(Audit) if row.action == "feedback set aside"]
    assert "what nobody thought of" in aside.reason


async def test_credit_brings_the_rater_along_whose_word_it_is(ring: Ring) -> None:
    first = await ring.turn(conversation_id="c")
    second = await ring.turn(conversation_id="c", parent_id=first.id)
    settings = ring.settings.model_copy(update={"rewards": RewardsConfig(discount=0.5)})
    await ring.thumb(second.id, "up", source={"kind": "HUMAN", "id": "ada"})
    await curate(ring.db, settings)
    assert {sample.rater for sample in await ring.all(Sample)} == {"HUMAN/ada"}
