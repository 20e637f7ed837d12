"""The curate stage: feedback becomes rewards and samples, finished turns get judgements."""

import time
from collections.abc import Sequence
from typing import Any

import pytest
from sqlalchemy import insert, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from alignment.config.rewards import RewardsConfig
from app.core.database import database_time
from app.models import (
    Audit,
    Feedback,
    Judgement,
    Origin,
    Policy,
    Project,
    ProjectUsage,
    Reward,
    Sample,
    SampleState,
    Turn,
    TurnState,
    Version,
    new_id,
)
from app.projects import usage
from app.projects.service import create_policy
from tests.support.deployment import Harness
from tests.support.turns import make_turn
from workers import curate as curate_module
from workers.curate import curate
from workers.feedback import signals
from workers.feedback.rewards import record_reward, update_turn_samples
from workers.judging import judge


async def test_a_rating_becomes_a_reward_and_a_sample(harness: Harness) -> None:
    turn = await harness.turn()
    await harness.vote(turn.id, "down", source={"kind": "HUMAN", "id": "ada"})
    assert await curate(harness.db, harness.settings) == 1
    [reward], [sample] = await harness.all(Reward), await harness.all(Sample)
    assert (reward.source, reward.value) == ("default/HUMAN/ada", -1.0)
    assert (sample.turn_id, sample.reward, sample.state) == (turn.id, -1.0, SampleState.OPEN)
    assert await curate(harness.db, harness.settings) == 0


async def test_rewards_are_stored_by_source_and_a_sample_has_their_mean(harness: Harness) -> None:
    turn = await harness.turn()
    await harness.vote(turn.id, "up", source={"kind": "HUMAN", "id": "ada"})
    await harness.vote(turn.id, "down", source={"kind": "HUMAN", "id": "bob"})
    await harness.vote(turn.id, "down", source={"kind": "LLM_JUDGE", "id": "ada"})
    await curate(harness.db, harness.settings)
    assert len(await harness.all(Reward)) == 3
    [sample] = await harness.all(Sample)
    assert abs(sample.reward + 1 / 3) < 1e-9


async def test_changed_feedback_counts_until_the_sample_is_in_a_batch(harness: Harness) -> None:
    turn = await harness.turn()
    await harness.vote(turn.id, "up")
    await curate(harness.db, harness.settings)
    await harness.vote(turn.id, "down")
    await curate(harness.db, harness.settings)
    [sample] = await harness.all(Sample)
    assert sample.reward == -1.0
    async with harness.db.write() as session:
        (await session.get_one(Sample, turn.id)).state = SampleState.TRAINED
    await harness.vote(turn.id, "up")
    await curate(harness.db, harness.settings)
    [sample] = await harness.all(Sample)
    [reward] = await harness.all(Reward)
    assert (sample.reward, reward.value) == (-1.0, 1.0)


async def test_feedback_about_a_streaming_reply_waits_for_its_end(harness: Harness) -> None:
    turn = await harness.turn(state=TurnState.OPEN, output_ids=None, logprobs=None)
    await harness.vote(turn.id, "up")
    assert await curate(harness.db, harness.settings) == 0
    async with harness.db.write() as session:
        (await session.get_one(Turn, turn.id)).state = TurnState.DONE
    assert await curate(harness.db, harness.settings) == 1
    assert [row.processed for row in await harness.all(Feedback)] == [True]


@pytest.mark.parametrize("kind", ["conversation", "comparison"])
async def test_feedback_about_several_replies_waits_for_all_of_them(harness: Harness, kind: str) -> None:
    ended = await harness.turn(conversation_id="c")
    turn = await harness.turn(conversation_id="c", state=TurnState.OPEN, output_ids=None, logprobs=None)
    about_conversation = {"kind": "score", "value": 1, "target": {"conversation_id": "c"}}
    comparison = {"kind": "comparison", "value": [ended.id, turn.id]}
    body = about_conversation if kind == "conversation" else comparison
    assert (await harness.api.post("/v1/feedback", json=body)).status_code == 201
    await harness.turn(conversation_id="c", state=TurnState.OPEN)  # began later: not what the feedback is about
    assert await curate(harness.db, harness.settings) == 0
    async with harness.db.write() as session:
        (await session.get_one(Turn, turn.id)).state = TurnState.DONE
    assert await curate(harness.db, harness.settings) == 1
    assert {row.turn_id for row in await harness.all(Sample)} == {ended.id, turn.id}


async def test_an_excluded_turn_gets_a_reward_but_its_sample_is_dropped(harness: Harness) -> None:
    turn = await harness.turn(exclusion_reason="3 output ids came with 2 log-probs")
    await harness.vote(turn.id, "down")
    await curate(harness.db, harness.settings)
    [sample] = await harness.all(Sample)
    assert (sample.state, sample.reason) == (SampleState.DROPPED, "3 output ids came with 2 log-probs")
    assert len(await harness.all(Reward)) == 1


async def test_a_rating_on_a_scale_becomes_a_score(harness: Harness) -> None:
    turn = await harness.turn()
    await harness.api.post("/v1/feedback", json={"completion_id": turn.id, "kind": "rating", "value": 2})
    await curate(harness.db, harness.settings)
    [sample] = await harness.all(Sample)
    assert sample.reward == -0.5  # a quarter of the way from 1 to 5


async def test_comments_and_unknown_labels_are_processed_once_and_give_no_reward(harness: Harness) -> None:
    turn = await harness.turn(conversation_id="c")
    for body in (
        {"completion_id": turn.id, "kind": "comment", "value": "thanks"},
        {"completion_id": turn.id, "kind": "categorical", "value": "greeting"},
        {"kind": "comment", "value": "thanks", "target": {"conversation_id": "c"}},
    ):
        assert (await harness.api.post("/v1/feedback", json=body)).status_code == 201
    assert (
        await curate(harness.db, harness.settings) == 2
    )  # those about a turn; the other one was processed from the start
    assert await harness.all(Reward) == await harness.all(Sample) == []
    assert all(row.processed for row in await harness.all(Feedback))


async def read_rewards(harness: Harness) -> dict[tuple[str, str], float]:
    return {(row.turn_id, row.source): row.value for row in await harness.all(Reward)}


async def test_corrections_and_labels_have_the_rewards_of_the_configuration(harness: Harness) -> None:
    turn = await harness.turn()
    explicit = {"type": "explicit", "correction": -0.25, "labels": {"rude": -1.0}}
    settings = harness.settings.replace({"rewards": RewardsConfig.model_validate({"sources": [explicit]})})
    for kind, value in (("correction", "better"), ("categorical", "rude")):
        body = {"completion_id": turn.id, "kind": kind, "value": value, "source": {"id": "ada"}}
        assert (await harness.api.post("/v1/feedback", json=body)).status_code == 201
    await curate(harness.db, settings)
    assert await read_rewards(harness) == {
        (turn.id, "correction/default/HUMAN/ada"): -0.25,
        (turn.id, "categorical/default/HUMAN/ada"): -1.0,
    }
    [sample] = await harness.all(Sample)
    assert sample.reward == -0.625


async def test_feedback_about_a_conversation_applies_to_its_turns(harness: Harness) -> None:
    a, b = [await harness.turn(conversation_id="c") for _ in range(2)]
    await harness.turn(conversation_id="another")
    body = {"kind": "score", "value": 0.5, "target": {"conversation_id": "c"}, "source": {"id": "ada"}}
    feedback_id = (await harness.api.post("/v1/feedback", json=body)).json()["id"]
    assert await curate(harness.db, harness.settings) == 1
    name = "conversation/default/HUMAN/ada"
    assert await read_rewards(harness) == {(a.id, name): 0.5, (b.id, name): 0.5}
    assert {sample.rater for sample in await harness.all(Sample)} == {"HUMAN/ada"}
    await withdraw(harness, feedback_id)
    assert await read_rewards(harness) == {}
    assert {sample.state for sample in await harness.all(Sample)} == {SampleState.DROPPED}


async def test_a_refused_request_has_no_share_of_its_conversations_feedback(harness: Harness) -> None:
    first = await harness.turn(conversation_id="c")
    last = await harness.turn(conversation_id="c")
    await harness.turn(conversation_id="c", state=TurnState.REFUSED, output_ids=None, exclusion_reason="refused")
    body = {"kind": "score", "value": 0.5, "target": {"conversation_id": "c"}, "source": {"id": "ada"}}
    await harness.api.post("/v1/feedback", json=body)
    rewards = RewardsConfig.model_validate({"sources": [{"type": "explicit"}], "spread": "last"})
    await curate(harness.db, harness.settings.replace({"rewards": rewards}))
    name = "conversation/default/HUMAN/ada"
    assert await read_rewards(harness) == {(first.id, name): 0.0, (last.id, name): 0.5}


async def test_a_comparison_rewards_both_turns_and_groups_those_with_the_same_prompt(harness: Harness) -> None:
    a, b = await harness.turn(), await harness.turn()
    other = await harness.turn(own_prompt_ids=[7, 8])
    await harness.api.post("/v1/feedback", json={"kind": "comparison", "value": [b.id, a.id], "source": {"id": "ada"}})
    body = {"kind": "ranking", "value": [other.id, [a.id, b.id]], "source": {"id": "bob"}}
    feedback_id = (await harness.api.post("/v1/feedback", json=body)).json()["id"]
    await curate(harness.db, harness.settings)
    samples = {sample.turn_id: sample for sample in await harness.all(Sample)}
    assert {id: sample.reward for id, sample in samples.items()} == {a.id: -1.0, b.id: 0.0, other.id: 1.0}
    assert samples[a.id].group_id == samples[b.id].group_id and samples[a.id].group_id
    assert samples[other.id].group_id == other.id, "its prompt is different"
    await withdraw(harness, feedback_id)
    samples = {sample.turn_id: sample for sample in await harness.all(Sample)}
    assert (samples[b.id].reward, samples[other.id].state) == (1.0, SampleState.DROPPED)


async def test_discounted_rewards_reach_earlier_turns(harness: Harness) -> None:
    first = await harness.turn(conversation_id="c")
    second = await harness.turn(conversation_id="c", parent_id=first.id)
    third = await harness.turn(conversation_id="c", parent_id=second.id)
    settings = harness.settings.replace({"rewards": RewardsConfig(discount=0.5)})
    await harness.vote(second.id, "up")
    await curate(harness.db, settings)
    await harness.vote(third.id, "down")
    await curate(harness.db, settings)
    rewards_by_turn = {sample.turn_id: sample.reward for sample in await harness.all(Sample)}
    assert rewards_by_turn == {first.id: 0.25, second.id: 0.5, third.id: -1.0}


async def test_credit_does_not_depend_on_when_the_later_reply_was_judged(harness: Harness) -> None:
    """A sample waits until every reply that counts for it can have been judged; what comes after that never counts."""
    sources = [{"type": "explicit"}, {"type": "next_turn", "window_seconds": 100}]
    rewards = RewardsConfig.model_validate({"sources": sources, "discount": 0.5, "credit_seconds": 600})
    settings = harness.settings.replace({"rewards": rewards})
    async with harness.db.read() as session:
        time = await database_time(session)

    async def judge_conversation(name: str, end: float, *, voted_first: bool) -> Sample:
        first = await harness.turn(conversation_id=name, finished_at=end)
        second = await harness.turn(conversation_id=name, parent_id=first.id, finished_at=end + 500)
        third = await harness.turn(conversation_id=name, parent_id=second.id, finished_at=end + 700)
        await harness.vote(first.id, "down")
        if voted_first:  # the sample of the first reply exists already
            await curate(harness.db, settings)
        async with harness.db.write() as session:
            await record_reward(session, second.id, "next_turn", 1.0)
            await record_reward(session, third.id, "next_turn", 1.0)
            await update_turn_samples(session, {second.id, third.id}, settings)
        await curate(harness.db, settings)
        return await harness.get(Sample, first.id)

    early = await judge_conversation("early", time, voted_first=False)
    late = await judge_conversation("late", time, voted_first=True)
    assert early.reward == late.reward == -0.5, "the second reply counts; the third ended after credit_seconds"
    assert early.ready_at == late.ready_at == time + 600 + 100, "until then the second reply can be judged"
    too_late = await judge_conversation("too late", time - 1000, voted_first=True)
    assert too_late.reward == -1.0, "a judgement after that does not count, whether or not the reply is in a batch"


async def test_a_sample_is_ready_when_its_sources_have_answered_or_their_windows_are_over(harness: Harness) -> None:
    sources = [{"type": "explicit"}, {"type": "next_turn", "window_seconds": 100}]
    config = RewardsConfig.model_validate({"sources": sources})
    settings = harness.settings.replace({"rewards": config})
    turn = await harness.turn(finished_at=1e9)
    await harness.vote(turn.id, "up")
    await curate(harness.db, settings)
    [sample] = await harness.all(Sample)
    assert sample.ready_at == 1e9 + 100
    async with harness.db.write() as session:
        await record_reward(session, turn.id, "next_turn", -1.0)
        await update_turn_samples(session, {turn.id}, settings)
    [sample] = await harness.all(Sample)
    assert sample.ready_at > 1e9 + 100, "it is ready now"
    assert sample.reward == pytest.approx((1.0 - 0.5 * 0.25) / (1 + 0.5 * 0.25)), "the automatic source counts less"


async def test_judgements_are_created_once_for_each_finished_turn(harness: Harness) -> None:
    sources = [
        {"type": "explicit"},
        {"type": "next_turn"},
        {"type": "rule", "name": "ended", "function": "ended"},
    ]
    settings = harness.settings.replace({"rewards": RewardsConfig.model_validate({"sources": sources})})
    first = await harness.turn(conversation_id="c")
    second = await harness.turn(
        conversation_id="c", parent_id=first.id, state=TurnState.ABORTED, exclusion_reason="cut"
    )
    await harness.turn(state=TurnState.OPEN)
    await harness.turn(exclusion_reason="no consent to train")
    await curate(harness.db, settings)
    await curate(harness.db, settings)
    judgements = sorted((row.turn_id, row.source) for row in await harness.all(Judgement))
    assert judgements == sorted([(first.id, "ended"), (first.id, "next_turn"), (second.id, "ended")])
    async with harness.db.write() as session:
        await session.execute(update(Turn).values(processed=False))
    await curate(harness.db, settings)
    assert len(await harness.all(Judgement)) == 3


async def test_feedback_without_a_turn_is_processed_once(harness: Harness) -> None:
    turn = await harness.turn(conversation_id="c")
    await harness.api.post("/v1/feedback", json={"kind": "score", "value": 1, "target": {"conversation_id": "c"}})
    async with harness.db.write() as session:
        (await session.get_one(Feedback, 1)).processed = False
    await harness.vote(turn.id)
    assert await curate(harness.db, harness.settings) == 2
    assert await curate(harness.db, harness.settings) == 0


async def rate_and_curate(harness: Harness, turn: Turn, value: str, person: str = "ada") -> str:
    feedback_id: str = (await harness.vote(turn.id, value, source={"id": person})).json()["id"]
    await curate(harness.db, harness.settings)
    return feedback_id


async def withdraw(harness: Harness, feedback_id: str) -> None:
    assert (await harness.api.delete(f"/v1/feedback/{feedback_id}")).json()["withdrawn"] is True
    await curate(harness.db, harness.settings)


async def test_withdrawn_feedback_no_longer_counts(harness: Harness) -> None:
    turn = await harness.turn()
    feedback_id = await rate_and_curate(harness, turn, "up")
    await rate_and_curate(harness, turn, "down", person="bob")
    await withdraw(harness, feedback_id)
    [reward], [sample] = await harness.all(Reward), await harness.all(Sample)
    assert (reward.source, sample.reward, sample.state) == ("default/HUMAN/bob", -1.0, SampleState.OPEN)


async def test_a_sample_without_rewards_is_dropped_until_new_feedback_arrives(harness: Harness) -> None:
    turn = await harness.turn()
    feedback_id = await rate_and_curate(harness, turn, "up")
    await withdraw(harness, feedback_id)
    [sample] = await harness.all(Sample)
    assert (sample.state, sample.rule) == (SampleState.DROPPED, "withdrawn")
    assert await harness.all(Reward) == []
    await rate_and_curate(harness, turn, "down", person="bob")
    [sample] = await harness.all(Sample)
    assert (sample.state, sample.reason, sample.reward) == (SampleState.OPEN, None, -1.0)


async def test_feedback_withdrawn_before_it_is_processed_leaves_no_sample(harness: Harness) -> None:
    turn = await harness.turn()
    feedback_id = (await harness.vote(turn.id)).json()["id"]
    await withdraw(harness, feedback_id)
    assert await harness.all(Reward) == await harness.all(Sample) == []


@pytest.mark.parametrize(
    ("state", "reason"), [(SampleState.TRAINED, None), (SampleState.BATCHED, None), (SampleState.DROPPED, "stale")]
)
async def test_a_sample_in_a_final_state_does_not_change(harness: Harness, state: str, reason: str | None) -> None:
    turn = await harness.turn()
    feedback_id = await rate_and_curate(harness, turn, "up")
    async with harness.db.write() as session:
        sample = await session.get_one(Sample, turn.id)
        sample.state, sample.reason = state, reason
    await withdraw(harness, feedback_id)
    await rate_and_curate(harness, turn, "down")
    [sample] = await harness.all(Sample)
    assert (sample.state, sample.reason, sample.reward) == (state, reason, 1.0)


async def test_withdrawing_a_comment_does_not_withdraw_the_rating(harness: Harness) -> None:
    turn = await harness.turn()
    await rate_and_curate(harness, turn, "up")
    body = {"completion_id": turn.id, "kind": "comment", "value": "nice", "source": {"id": "ada"}}
    comment = (await harness.api.post("/v1/feedback", json=body)).json()["id"]
    await withdraw(harness, comment)
    [reward], [sample] = await harness.all(Reward), await harness.all(Sample)
    assert (reward.value, sample.state) == (1.0, SampleState.OPEN)
    assert all(row.processed for row in await harness.all(Feedback))


async def test_the_sample_of_a_deleted_turn_is_never_reopened(harness: Harness) -> None:
    turn = await harness.turn(conversation_id="c")
    await withdraw(harness, await rate_and_curate(harness, turn, "up"))
    assert (await harness.api.delete(f"/v1/chat/completions/{turn.id}")).status_code == 200
    await harness.turn(conversation_id="c")
    body = {"kind": "score", "value": 1, "target": {"conversation_id": "c"}, "source": {"id": "ada"}}
    assert (await harness.api.post("/v1/feedback", json=body)).status_code == 201
    await curate(harness.db, harness.settings)
    assert (await harness.get(Sample, turn.id)).state == SampleState.DROPPED


async def test_a_conversation_may_move_to_another_policy(harness: Harness) -> None:
    first, later = await harness.turn(conversation_id="c"), await harness.turn(conversation_id="c")
    async with harness.db.write() as session:
        await create_policy(session, first.project_id, "second", harness.settings.model)
        second = (await session.scalars(select(Policy).where(Policy.name == "second"))).one()
        moved_turn = await session.get_one(Turn, later.id)
        moved_turn.policy_id, moved_turn.version_id = second.id, second.head_version_id or ""
    body = {"kind": "score", "value": 0.5, "target": {"conversation_id": "c"}, "source": {"id": "ada"}}
    await harness.api.post("/v1/feedback", json=body)
    await curate(harness.db, harness.settings)
    await rate_and_curate(harness, later, "up", person="bob")
    assert len(await harness.all(Reward)) == 3


async def test_feedback_that_fails_is_skipped_and_the_rest_is_processed(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad, good = await harness.turn(), await harness.turn()
    for turn in (bad, good):
        await harness.vote(turn.id, "up")
    read_signals = signals.read_signals

    async def fail_for_bad(
        session: AsyncSession, turns: Sequence[signals.FinishedTurn], *args: Any
    ) -> signals.SignalsByTurn:
        if bad.id in {turn.id for turn in turns}:
            raise KeyError("an unexpected error")
        return await read_signals(session, turns, *args)

    monkeypatch.setattr(signals, "read_signals", fail_for_bad)
    await curate(harness.db, harness.settings)
    assert [sample.turn_id for sample in await harness.all(Sample)] == [good.id]
    assert all(row.processed for row in await harness.all(Feedback))
    [audit] = [row for row in await harness.all(Audit) if row.action == "feedback.skipped"]
    assert "an unexpected error" in audit.reason


async def test_a_discounted_reward_keeps_its_rater(harness: Harness) -> None:
    first = await harness.turn(conversation_id="c")
    second = await harness.turn(conversation_id="c", parent_id=first.id)
    settings = harness.settings.replace({"rewards": RewardsConfig(discount=0.5)})
    await harness.vote(second.id, "up", source={"kind": "HUMAN", "id": "ada"})
    await curate(harness.db, settings)
    assert {sample.rater for sample in await harness.all(Sample)} == {"HUMAN/ada"}


async def test_only_the_feedback_that_failed_is_skipped(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reply of older feedback ends between the failure and the skip."""
    streaming, bad = await harness.turn(state=TurnState.OPEN), await harness.turn()
    for turn in (streaming, bad):
        await harness.vote(turn.id, "up")
    read_signals, process_page = signals.read_signals, curate_module._process_page

    async def fail_for_bad(
        session: AsyncSession, turns: Sequence[signals.FinishedTurn], *args: Any
    ) -> signals.SignalsByTurn:
        if bad.id in {turn.id for turn in turns}:
            raise KeyError("an unexpected error")
        return await read_signals(session, turns, *args)

    async def end_reply_after_failure(*args: Any) -> tuple[int, bool]:
        try:
            return await process_page(*args)
        except Exception:
            async with harness.db.write() as session:
                (await session.get_one(Turn, streaming.id)).state = TurnState.DONE
            raise

    monkeypatch.setattr(signals, "read_signals", fail_for_bad)
    monkeypatch.setattr(curate_module, "_process_page", end_reply_after_failure)
    assert await curate_module._process_one_by_one(harness.db, harness.settings) == 2
    assert [sample.turn_id for sample in await harness.all(Sample)] == [streaming.id]
    [audit] = [row for row in await harness.all(Audit) if row.action == "feedback.skipped"]
    feedback = {row.turn_id: row.id for row in await harness.all(Feedback)}
    assert audit.subject == feedback[bad.id]


async def add_other_project(harness: Harness) -> tuple[Policy, Version]:
    async with harness.db.write() as session:
        project = Project(id=new_id("proj"), name="other")
        session.add(project)
        await session.flush()
        await create_policy(session, project.id, "other", harness.settings.model)
        policy = (await session.scalars(select(Policy).where(Policy.project_id == project.id))).one()
        version = (await session.scalars(select(Version).where(Version.policy_id == policy.id))).one()
    return policy, version


def make_vote(turn: Turn, number: int) -> dict[str, Any]:
    return {
        "id": new_id("fb"),
        "project_id": turn.project_id,
        "turn_id": turn.id,
        "target": turn.id,
        "kind": "binary",
        "name": "default",
        "value": 1.0,
        "source_kind": "HUMAN",
        "source_id": f"user-{number % 10}",
        "idempotency_key": new_id("auto"),
        "fingerprint": "",
    }


async def test_a_backlog_delays_no_other_project(harness: Harness) -> None:
    busy, own, serving = await harness.turn(), await harness.policy(), await harness.serving()
    waiting = [make_turn(own, serving, new_id("chatcmpl")) for _ in range(1000)]
    other = make_turn(*await add_other_project(harness), new_id("chatcmpl"))
    async with harness.db.write() as session:
        session.add_all([other, *waiting])
        await session.flush()
        await session.execute(insert(Feedback), [make_vote(busy, number) for number in range(10_000)])
        await session.execute(insert(Feedback), [make_vote(other, 0)])
        await session.execute(update(Turn).values(finished_at=1.0))
        await session.execute(update(Turn).where(Turn.id == other.id).values(finished_at=2.0))
    num_read, is_last = await curate_module._process_page(harness.db, harness.settings, curate_module.PAGE_SIZE)
    assert num_read <= 500 and not is_last
    assert [row.turn_id for row in await harness.all(Feedback) if row.processed and row.turn_id == other.id] == [
        other.id
    ]
    async with harness.db.write() as session:
        assert await curate_module.process_finished_turns(session, 500, harness.settings) <= 500
    assert (await harness.get(Turn, other.id)).processed
    assert not all(row.processed for row in await harness.all(Turn))


async def test_turns_of_a_project_that_fail_hold_up_no_other(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    own = [await harness.turn() for _ in range(3)]
    other = make_turn(*await add_other_project(harness), new_id("chatcmpl"))
    async with harness.db.write() as session:
        session.add(other)
    create = judge.create_judgements

    async def fail_for_other(session: AsyncSession, turns: Any, configs: Any) -> None:
        if any(turn.id == other.id for turn in turns):
            raise ValueError("the rewards of this policy cannot be read")
        await create(session, turns, configs)

    with monkeypatch.context() as patched:
        patched.setattr(judge, "create_judgements", fail_for_other)
        await curate(harness.db, harness.settings)
    processed = {turn.id for turn in await harness.all(Turn) if turn.processed}
    assert processed == {turn.id for turn in own}
    await curate(harness.db, harness.settings)
    assert (await harness.get(Turn, other.id)).processed


async def test_output_tokens_of_finished_chats_are_counted_once(harness: Harness) -> None:
    project_id, today = (await harness.policy()).project_id, time.time()
    for origin in (Origin.CHAT, Origin.CHAT, Origin.GROUP_SAMPLE):
        await harness.turn(origin=origin, num_output_tokens=7, finished_at=today)
    for _ in range(2):
        async with harness.db.read() as session:
            assert await usage.count_output_tokens(session, project_id) == 14
        await curate(harness.db, harness.settings)
    [row] = await harness.all(ProjectUsage)
    assert (row.project_id, row.day, row.output_tokens) == (project_id, int(today // 86_400), 14)
