"""Feedback → Rewards and Samples."""

from collections.abc import Sequence
from typing import Any

import pytest
from sqlalchemy import select, update
from sqlalchemy.ext.asyncio import AsyncSession

from alignment.config.rewards import RewardsConfig
from app.models import Audit, Feedback, Judgement, Policy, Reward, Sample, SampleState, Turn, TurnState
from app.projects.bootstrap import first_policy
from tests.support.deployment import Harness
from workers.feedback import signals
from workers.feedback.curate import curate, note, reconsider


async def test_a_thumb_becomes_a_reward_and_a_sample(harness: Harness) -> None:
    turn = await harness.turn()
    await harness.thumb(turn.id, "down", source={"kind": "HUMAN", "id": "ada"})
    assert await curate(harness.db, harness.settings) == 1
    [reward], [sample] = await harness.all(Reward), await harness.all(Sample)
    assert (reward.source, reward.value) == ("default/HUMAN/ada", -1.0)
    assert (sample.turn_id, sample.reward, sample.state) == (turn.id, -1.0, SampleState.OPEN)
    assert await curate(harness.db, harness.settings) == 0


async def test_rewards_stay_apart_by_source_and_a_sample_carries_their_mean(harness: Harness) -> None:
    turn = await harness.turn()
    await harness.thumb(turn.id, "up", source={"kind": "HUMAN", "id": "ada"})
    await harness.thumb(turn.id, "down", source={"kind": "HUMAN", "id": "bob"})
    await harness.thumb(turn.id, "down", source={"kind": "LLM_JUDGE", "id": "ada"})
    await curate(harness.db, harness.settings)
    assert len(await harness.all(Reward)) == 3
    [sample] = await harness.all(Sample)
    assert abs(sample.reward + 1 / 3) < 1e-9


async def test_second_thoughts_count_until_a_batch_is_frozen(harness: Harness) -> None:
    turn = await harness.turn()
    await harness.thumb(turn.id, "up")
    await curate(harness.db, harness.settings)
    await harness.thumb(turn.id, "down")
    await curate(harness.db, harness.settings)
    [sample] = await harness.all(Sample)
    assert sample.reward == -1.0
    async with harness.db.write() as session:
        (await session.get_one(Sample, turn.id)).state = SampleState.TRAINED
    await harness.thumb(turn.id, "up")
    await curate(harness.db, harness.settings)
    [sample] = await harness.all(Sample)
    [reward] = await harness.all(Reward)
    assert (sample.reward, reward.value) == (-1.0, 1.0)


async def test_a_thumb_that_outruns_its_stream_waits_for_the_end(harness: Harness) -> None:
    turn = await harness.turn(state=TurnState.OPEN, output_ids=None, logprobs=None)
    await harness.thumb(turn.id, "up")
    assert await curate(harness.db, harness.settings) == 0
    async with harness.db.write() as session:
        (await session.get_one(Turn, turn.id)).state = TurnState.DONE
    assert await curate(harness.db, harness.settings) == 1
    assert [row.processed for row in await harness.all(Feedback)] == [True]


async def test_a_flawed_turn_is_rewarded_but_never_learned_from(harness: Harness) -> None:
    turn = await harness.turn(exclusion_reason="3 output ids came with 2 log-probs")
    await harness.thumb(turn.id, "down")
    await curate(harness.db, harness.settings)
    [sample] = await harness.all(Sample)
    assert (sample.state, sample.reason) == (SampleState.DROPPED, "3 output ids came with 2 log-probs")
    assert len(await harness.all(Reward)) == 1


async def test_a_rating_counts_like_a_score(harness: Harness) -> None:
    turn = await harness.turn()
    await harness.api.post("/v1/feedback", json={"completion_id": turn.id, "kind": "rating", "value": 2})
    await curate(harness.db, harness.settings)
    [sample] = await harness.all(Sample)
    assert sample.reward == -0.5  # a quarter of the way from 1 to 5


async def test_words_without_a_number_are_read_once_and_make_no_reward(harness: Harness) -> None:
    turn = await harness.turn(conversation_id="c")
    for body in (
        {"completion_id": turn.id, "kind": "comment", "value": "thanks"},
        {"completion_id": turn.id, "kind": "categorical", "value": "greeting"},
        {"kind": "comment", "value": "thanks", "target": {"conversation_id": "c"}},
    ):
        assert (await harness.api.post("/v1/feedback", json=body)).status_code == 201
    assert await curate(harness.db, harness.settings) == 2  # those on a turn; the other was never waiting
    assert await harness.all(Reward) == await harness.all(Sample) == []
    assert all(row.processed for row in await harness.all(Feedback))


async def rewards(harness: Harness) -> dict[tuple[str, str], float]:
    return {(row.turn_id, row.source): row.value for row in await harness.all(Reward)}


async def test_a_correction_and_a_label_are_worth_what_the_policy_says(harness: Harness) -> None:
    turn = await harness.turn()
    explicit = {"type": "explicit", "correction": -0.25, "labels": {"rude": -1.0}}
    settings = harness.settings.model_copy(update={"rewards": RewardsConfig.model_validate({"sources": [explicit]})})
    for kind, value in (("correction", "better"), ("categorical", "rude")):
        body = {"completion_id": turn.id, "kind": kind, "value": value, "source": {"id": "ada"}}
        assert (await harness.api.post("/v1/feedback", json=body)).status_code == 201
    await curate(harness.db, settings)
    assert await rewards(harness) == {
        (turn.id, "correction/default/HUMAN/ada"): -0.25,
        (turn.id, "categorical/default/HUMAN/ada"): -1.0,
    }
    [sample] = await harness.all(Sample)
    assert sample.reward == -0.625


async def test_a_word_about_a_conversation_falls_on_its_turns(harness: Harness) -> None:
    a, b = [await harness.turn(conversation_id="c") for _ in range(2)]
    await harness.turn(conversation_id="another")
    body = {"kind": "score", "value": 0.5, "target": {"conversation_id": "c"}, "source": {"id": "ada"}}
    said = (await harness.api.post("/v1/feedback", json=body)).json()["id"]
    assert await curate(harness.db, harness.settings) == 1
    name = "conversation/default/HUMAN/ada"
    assert await rewards(harness) == {(a.id, name): 0.5, (b.id, name): 0.5}
    assert {sample.rater for sample in await harness.all(Sample)} == {"HUMAN/ada"}
    await take_back(harness, said)
    assert await rewards(harness) == {}
    assert {sample.state for sample in await harness.all(Sample)} == {SampleState.DROPPED}


async def test_a_comparison_is_a_reward_for_both_and_a_group_where_the_prompt_is_the_same(harness: Harness) -> None:
    a, b = await harness.turn(), await harness.turn()
    other = await harness.turn(prompt_ids=[7, 8])
    await harness.api.post("/v1/feedback", json={"kind": "comparison", "value": [b.id, a.id], "source": {"id": "ada"}})
    body = {"kind": "ranking", "value": [other.id, [a.id, b.id]], "source": {"id": "bob"}}
    said = (await harness.api.post("/v1/feedback", json=body)).json()["id"]
    await curate(harness.db, harness.settings)
    samples = {sample.turn_id: sample for sample in await harness.all(Sample)}
    assert {id: sample.reward for id, sample in samples.items()} == {a.id: -1.0, b.id: 0.0, other.id: 1.0}
    assert samples[a.id].group_id == samples[b.id].group_id and samples[a.id].group_id
    assert samples[other.id].group_id == other.id, "it answers another prompt"
    await take_back(harness, said)
    samples = {sample.turn_id: sample for sample in await harness.all(Sample)}
    assert (samples[b.id].reward, samples[other.id].state) == (1.0, SampleState.DROPPED)


async def test_credit_reaches_the_replies_before(harness: Harness) -> None:
    first = await harness.turn(conversation_id="c")
    second = await harness.turn(conversation_id="c", parent_id=first.id)
    third = await harness.turn(conversation_id="c", parent_id=second.id)
    settings = harness.settings.model_copy(update={"rewards": RewardsConfig(discount=0.5)})
    await harness.thumb(second.id, "up")
    await curate(harness.db, settings)
    await harness.thumb(third.id, "down")
    await curate(harness.db, settings)
    worth = {sample.turn_id: sample.reward for sample in await harness.all(Sample)}
    assert worth == {first.id: 0.25, second.id: 0.5, third.id: -1.0}


async def test_a_sample_ripens_when_its_sources_have_spoken_or_are_no_longer_waited_for(harness: Harness) -> None:
    sources = [{"type": "explicit"}, {"type": "next_turn", "window_seconds": 100}]
    config = RewardsConfig.model_validate({"sources": sources})
    settings = harness.settings.model_copy(update={"rewards": config})
    turn = await harness.turn(finished_at=1e9)
    await harness.thumb(turn.id, "up")
    await curate(harness.db, settings)
    [sample] = await harness.all(Sample)
    assert sample.ready_at == 1e9 + 100
    async with harness.db.write() as session:
        await note(session, turn.id, "next_turn", -1.0)
        await reconsider(session, {turn.id}, settings)
    [sample] = await harness.all(Sample)
    assert sample.ready_at > 1e9 + 100, "ripe from now on"
    assert sample.reward == pytest.approx((1.0 - 0.5 * 0.25) / (1 + 0.5 * 0.25)), "the machine counts less"


async def test_sources_are_asked_once_about_each_turn_that_ended(harness: Harness) -> None:
    sources = [
        {"type": "explicit"},
        {"type": "next_turn"},
        {"type": "rule", "name": "ended", "function": "ended"},
    ]
    settings = harness.settings.model_copy(update={"rewards": RewardsConfig.model_validate({"sources": sources})})
    first = await harness.turn(conversation_id="c")
    second = await harness.turn(
        conversation_id="c", parent_id=first.id, state=TurnState.ABORTED, exclusion_reason="cut"
    )
    await harness.turn(state=TurnState.OPEN)
    await harness.turn(exclusion_reason="no consent to train")
    await curate(harness.db, settings)
    await curate(harness.db, settings)
    asked = sorted((row.turn_id, row.source) for row in await harness.all(Judgement))
    assert asked == sorted([(first.id, "ended"), (first.id, "next_turn"), (second.id, "ended")])
    async with harness.db.write() as session:
        await session.execute(update(Turn).values(processed=False))
    await curate(harness.db, settings)
    assert len(await harness.all(Judgement)) == 3


async def test_a_row_without_a_turn_does_not_ring_for_ever(harness: Harness) -> None:
    turn = await harness.turn(conversation_id="c")
    await harness.api.post("/v1/feedback", json={"kind": "score", "value": 1, "target": {"conversation_id": "c"}})
    async with harness.db.write() as session:
        (await session.get_one(Feedback, 1)).processed = False
    await harness.thumb(turn.id)
    assert await curate(harness.db, harness.settings) == 2
    assert await curate(harness.db, harness.settings) == 0


async def say(harness: Harness, turn: Turn, value: str, who: str = "ada") -> str:
    said: str = (await harness.thumb(turn.id, value, source={"id": who})).json()["id"]
    await curate(harness.db, harness.settings)
    return said


async def take_back(harness: Harness, said: str) -> None:
    assert (await harness.api.delete(f"/v1/feedback/{said}")).json()["withdrawn"] is True
    await curate(harness.db, harness.settings)


async def test_what_is_withdrawn_no_longer_weighs(harness: Harness) -> None:
    turn = await harness.turn()
    said = await say(harness, turn, "up")
    await say(harness, turn, "down", who="bob")
    await take_back(harness, said)
    [reward], [sample] = await harness.all(Reward), await harness.all(Sample)
    assert (reward.source, sample.reward, sample.state) == ("default/HUMAN/bob", -1.0, SampleState.OPEN)


async def test_a_sample_of_which_nothing_is_left_is_dropped_until_something_is_said_again(harness: Harness) -> None:
    turn = await harness.turn()
    said = await say(harness, turn, "up")
    await take_back(harness, said)
    [sample] = await harness.all(Sample)
    assert (sample.state, sample.reason) == (SampleState.DROPPED, "withdrawn")
    assert await harness.all(Reward) == []
    await say(harness, turn, "down", who="bob")
    [sample] = await harness.all(Sample)
    assert (sample.state, sample.reason, sample.reward) == (SampleState.OPEN, None, -1.0)


async def test_a_withdrawal_before_anybody_looked_leaves_no_sample(harness: Harness) -> None:
    turn = await harness.turn()
    said = (await harness.thumb(turn.id)).json()["id"]
    await take_back(harness, said)
    assert await harness.all(Reward) == await harness.all(Sample) == []


@pytest.mark.parametrize(
    ("state", "reason"), [(SampleState.TRAINED, None), (SampleState.BATCHED, None), (SampleState.DROPPED, "stale")]
)
async def test_a_sample_that_has_gone_on_is_left_where_it_is(harness: Harness, state: str, reason: str | None) -> None:
    turn = await harness.turn()
    said = await say(harness, turn, "up")
    async with harness.db.write() as session:
        sample = await session.get_one(Sample, turn.id)
        sample.state, sample.reason = state, reason
    await take_back(harness, said)
    await say(harness, turn, "down")
    [sample] = await harness.all(Sample)
    assert (sample.state, sample.reason, sample.reward) == (state, reason, 1.0)


async def test_taking_a_comment_back_does_not_take_the_thumb_back(harness: Harness) -> None:
    turn = await harness.turn()
    await say(harness, turn, "up")
    body = {"completion_id": turn.id, "kind": "comment", "value": "nice", "source": {"id": "ada"}}
    comment = (await harness.api.post("/v1/feedback", json=body)).json()["id"]
    await take_back(harness, comment)
    [reward], [sample] = await harness.all(Reward), await harness.all(Sample)
    assert (reward.value, sample.state) == (1.0, SampleState.OPEN)
    assert all(row.processed for row in await harness.all(Feedback))


async def test_a_deleted_turn_is_never_opened_again(harness: Harness) -> None:
    turn = await harness.turn(conversation_id="c")
    await take_back(harness, await say(harness, turn, "up"))
    assert (await harness.api.delete(f"/v1/chat/completions/{turn.id}")).status_code == 200
    await harness.turn(conversation_id="c")
    body = {"kind": "score", "value": 1, "target": {"conversation_id": "c"}, "source": {"id": "ada"}}
    assert (await harness.api.post("/v1/feedback", json=body)).status_code == 201
    await curate(harness.db, harness.settings)
    assert (await harness.get(Sample, turn.id)).state == SampleState.DROPPED


async def test_a_conversation_may_go_from_one_policy_to_another(harness: Harness) -> None:
    first, later = await harness.turn(conversation_id="c"), await harness.turn(conversation_id="c")
    async with harness.db.write() as session:
        await first_policy(session, first.project_id, "second", harness.settings.model)
        second = (await session.scalars(select(Policy).where(Policy.name == "second"))).one()
        moved = await session.get_one(Turn, later.id)
        moved.policy_id, moved.version_id = second.id, second.head_version_id or ""
    body = {"kind": "score", "value": 0.5, "target": {"conversation_id": "c"}, "source": {"id": "ada"}}
    await harness.api.post("/v1/feedback", json=body)
    await curate(harness.db, harness.settings)
    await say(harness, later, "up", who="bob")
    assert len(await harness.all(Reward)) == 3


async def test_what_nothing_can_be_made_of_is_set_aside_and_the_rest_is_read(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad, good = await harness.turn(), await harness.turn()
    for turn in (bad, good):
        await harness.thumb(turn.id, "up")
    spoken = signals.spoken

    async def breaks(session: AsyncSession, judged: Sequence[signals.Judged], *rest: Any) -> signals.Said:
        if bad.id in {turn.id for turn in judged}:
            raise KeyError("what nobody thought of")
        return await spoken(session, judged, *rest)

    monkeypatch.setattr(signals, "spoken", breaks)
    await curate(harness.db, harness.settings)
    assert [sample.turn_id for sample in await harness.all(Sample)] == [good.id]
    assert all(row.processed for row in await harness.all(Feedback))
    [aside] = [row for row in await harness.all(Audit) if row.action == "feedback set aside"]
    assert "what nobody thought of" in aside.reason


async def test_credit_brings_the_rater_along_whose_word_it_is(harness: Harness) -> None:
    first = await harness.turn(conversation_id="c")
    second = await harness.turn(conversation_id="c", parent_id=first.id)
    settings = harness.settings.model_copy(update={"rewards": RewardsConfig(discount=0.5)})
    await harness.thumb(second.id, "up", source={"kind": "HUMAN", "id": "ada"})
    await curate(harness.db, settings)
    assert {sample.rater for sample in await harness.all(Sample)} == {"HUMAN/ada"}
