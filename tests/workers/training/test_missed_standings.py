"""A rater is blocked or quarantined while another transaction holds the samples, which are therefore skipped."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from sqlalchemy import select

from app.core.settings import Settings
from app.models import BatchState, Rater, RaterStanding, Reward, Sample, SampleRule, SampleState, Turn
from app.policies.locks import lock_policy
from app.training import batch_samples
from tests.support import episodes
from tests.support.attempts import attempt, compare, read_samples
from tests.support.deployment import Harness
from tests.support.judgements import settings_with_sources
from tests.support.settings import by_path
from tests.support.updates import rate
from workers.curate import curate
from workers.feedback.rewards import record_reward, update_turn_samples
from workers.training.assemble import assemble

MALLORY = "HUMAN/mallory"


@asynccontextmanager
async def held_samples(harness: Harness, turn_ids: list[str]) -> AsyncIterator[None]:
    """Hold these samples as the assembly does while it prepares them. SQLite has one writer: nothing is held there."""
    if harness.db.embedded:
        yield
        return
    async with harness.db.write() as session:
        await session.scalars(select(Sample).where(Sample.turn_id.in_(turn_ids)).with_for_update())
        yield


async def set_standing(harness: Harness, name: str, standing: str) -> None:
    answer = await harness.api.put(f"/v1/raters/{name}", json={"standing": standing, "reason": "a test"})
    assert answer.status_code == 200, answer.text


async def miss_standing(harness: Harness, standing: str, name: str = MALLORY) -> None:
    """Set the standing of a rater, all of whose samples are held at that moment."""
    async with harness.db.write() as session:
        rater = await session.get_one(Rater, ((await harness.policy()).project_id, name))
        rater.standing, rater.reason = standing, f"{standing} by a test"


def all_together(harness: Harness) -> Settings:
    return harness.settings.replace(by_path({"trainer__max_batch_size": 10}))


async def samples_of(harness: Harness, turn_ids: list[str]) -> list[Sample]:
    return sorted(
        (sample for sample in await harness.all(Sample) if sample.turn_id in turn_ids), key=lambda one: one.turn_id
    )


@pytest.mark.parametrize("standing", ["blocked", "quarantined"])
async def test_no_batch_has_a_sample_of_a_rater_who_was_refused_while_it_was_held(
    harness: Harness, standing: str
) -> None:
    others = await rate(harness, "+-+-+-+-", rater="ada")
    refused = await rate(harness, "+-", rater="mallory")
    async with held_samples(harness, refused):
        await set_standing(harness, MALLORY, standing)
    assert await assemble(harness.db, all_together(harness)) == 1
    assert {sample.state for sample in await samples_of(harness, others)} == {SampleState.BATCHED}
    expected = SampleState.DROPPED if standing == "blocked" else SampleState.QUARANTINED
    found = await samples_of(harness, refused)
    assert [sample.state for sample in found] == [expected] * 2
    if standing == "blocked":
        assert {sample.rule for sample in found} == {SampleRule.RATER_BLOCKED}
        assert [reward.weight for reward in await harness.all(Reward) if reward.turn_id in refused] == [0.0] * 2


@pytest.mark.parametrize("standing", ["blocked", "quarantined"])
async def test_samples_that_are_in_no_batch_stay_as_they_are(harness: Harness, standing: str) -> None:
    """A rater may have thousands of samples, and the assembly of a policy settles those of its next batch alone."""
    await rate(harness, "+-+-+-+-", rater="ada")
    [refused, later] = await rate(harness, "+-", rater="mallory")
    async with harness.db.write() as session:
        (await session.get_one(Sample, later)).ready_at = 4e9
    await miss_standing(harness, standing)
    assert await assemble(harness.db, all_together(harness)) == 1
    expected = SampleState.DROPPED if standing == "blocked" else SampleState.QUARANTINED
    assert (await harness.get(Sample, refused)).state == expected
    assert (await harness.get(Sample, later)).state == SampleState.OPEN
    assert [reward.weight for reward in await harness.all(Reward) if reward.turn_id == later] == [1.0]


async def test_a_sample_that_others_have_rated_too_is_computed_again(harness: Harness) -> None:
    """Also where what they say is about the whole conversation."""
    others = await rate(harness, "+-+-+-+-", rater="ada")
    shared = [(await harness.turn(conversation_id=id)).id for id in ("c", "d")]
    for turn_id, target in zip(shared, ({"completion_id": shared[0]}, {"conversation_id": "d"}), strict=True):
        await harness.vote(turn_id, "up", source={"kind": "HUMAN", "id": "mallory"})
        by_bob = {"target": target, "kind": "binary", "value": False, "source": {"id": "bob"}}
        assert (await harness.api.post("/v1/feedback", json=by_bob)).status_code == 201
    await curate(harness.db, harness.settings)
    assert [sample.reward for sample in await samples_of(harness, shared)] == [0.0, 0.0]
    await miss_standing(harness, RaterStanding.BLOCKED)
    assert await assemble(harness.db, all_together(harness)) == 1
    assert {sample.state for sample in await samples_of(harness, others)} == {SampleState.BATCHED}
    for sample in await samples_of(harness, shared):
        assert (sample.state, sample.rule) == (SampleState.OPEN, None)
        assert sample.ready_at > sample.changed_at, "not ready before"
    await curate(harness.db, harness.settings)
    found = await samples_of(harness, shared)
    assert [(sample.reward, sample.rater) for sample in found] == [(-1.0, "HUMAN/bob")] * 2
    assert all(sample.ready_at <= sample.changed_at for sample in found)


async def rate_by_judges(harness: Harness, end_user: str, **of_turn: Any) -> str:
    """Return a turn without feedback: the end user's next message says +1, and a judge -1."""
    judge = {"type": "judge", "url": "http://127.0.0.1:9", "model": "m", "window_seconds": 0}
    harness.settings = settings_with_sources(harness, {"type": "next_turn", "window_seconds": 0}, judge)
    turn = await harness.turn(**of_turn)
    async with harness.db.write() as session:
        await record_reward(session, turn.id, "next_turn", 1.0, rater=end_user)
        await record_reward(session, turn.id, "judge", -1.0)
        await update_turn_samples(session, [turn.id], harness.settings)
    assert (await harness.get(Sample, turn.id)).reward == 0.0
    return turn.id


@pytest.mark.parametrize("is_held", [False, True])
async def test_feedback_on_an_earlier_turn_does_not_compute_it(harness: Harness, is_held: bool) -> None:
    await rate(harness, "+-+-+-+-", rater="ada")
    earlier = await harness.turn(conversation_id="c")
    await harness.vote(earlier.id, "up", source={"kind": "HUMAN", "id": "bob"})
    await curate(harness.db, harness.settings)
    turn_id = await rate_by_judges(harness, "end-user/mal", conversation_id="c")
    if is_held:
        await miss_standing(harness, RaterStanding.BLOCKED, "end-user/mal")
    else:
        await set_standing(harness, "end-user/mal", "blocked")
    await assemble(harness.db, all_together(harness))
    await curate(harness.db, harness.settings)
    sample = await harness.get(Sample, turn_id)
    assert (sample.reward, sample.rater) == (-1.0, None)


@pytest.mark.parametrize("is_held", [False, True])
async def test_a_reward_that_no_feedback_lets_curation_compute_is_computed_too(harness: Harness, is_held: bool) -> None:
    await rate(harness, "+-+-+-+-", rater="ada")
    turn_id = await rate_by_judges(harness, "end-user/mal")
    if is_held:
        await miss_standing(harness, RaterStanding.BLOCKED, "end-user/mal")
    else:
        await set_standing(harness, "end-user/mal", "blocked")
    await curate(harness.db, harness.settings)
    assert await assemble(harness.db, all_together(harness)) == 1
    sample = await harness.get(Sample, turn_id)
    assert (sample.reward, sample.rater, sample.state) == (-1.0, None, SampleState.BATCHED)


async def test_a_returned_sample_of_judges_is_computed_without_the_blocked_rater(harness: Harness) -> None:
    await rate(harness, "+-+-+-+-", rater="ada")
    turn_id = await rate_by_judges(harness, "end-user/mal")
    assert await assemble(harness.db, all_together(harness)) == 1
    batch_id = (await harness.get(Sample, turn_id)).batch_id
    await set_standing(harness, "end-user/mal", "blocked")
    async with harness.db.write() as session:
        locked = await lock_policy(session, (await harness.policy()).id)
        await batch_samples.break_up_batches(locked, [batch_id], BatchState.FAILED, "the head moved")
    await curate(harness.db, harness.settings)
    assert await assemble(harness.db, all_together(harness)) == 1
    sample = await harness.get(Sample, turn_id)
    assert (sample.reward, sample.rater, sample.state) == (-1.0, None, SampleState.BATCHED)


async def compare_attempts(harness: Harness) -> list[list[str]]:
    """Compare two attempts of two turns each; mallory has rated the last turn of the first one. Return their turns."""
    compare(harness)
    first = await attempt(harness, 2)
    turns = [turn for turn in await harness.all(Turn) if turn.episode_id == first["id"]]
    last = max(turns, key=lambda turn: turn.episode_step or 0)
    await harness.vote(last.id, "down", source={"kind": "HUMAN", "id": "mallory"})
    await episodes.end(harness, first["id"], outcome=1.0)
    second = await attempt(harness, 2, -1.0)
    found = await read_samples(harness)
    assert {sample.reward for sample in found[first["id"]]} == {0.0}
    return [[sample.turn_id for sample in found[episode["id"]]] for episode in (first, second)]


async def test_a_turn_of_a_compared_episode_gives_up_the_vote_on_another_turn(harness: Harness) -> None:
    """One turn is held while the rater is blocked, so that only the other one gives up the vote at once."""
    [[held, rated], _] = await compare_attempts(harness)
    async with held_samples(harness, [held]):
        await set_standing(harness, MALLORY, "blocked")
    assert await assemble(harness.db, harness.settings) == 0
    assert {sample.state for sample in await harness.all(Sample)} == {SampleState.OPEN}
    await curate(harness.db, harness.settings)
    assert [sample.reward for sample in await samples_of(harness, [held, rated])] == [1.0, 1.0]
    assert await assemble(harness.db, harness.settings) == 1
    assert {sample.state for sample in await harness.all(Sample)} == {SampleState.BATCHED}


@pytest.mark.parametrize("standing", ["blocked", "quarantined"])
async def test_all_turns_of_a_compared_episode_have_its_raters(harness: Harness, standing: str) -> None:
    [refused, others] = await compare_attempts(harness)
    await miss_standing(harness, standing)
    assert await assemble(harness.db, harness.settings) == 0
    found = await samples_of(harness, refused)
    if standing == "quarantined":
        expected = [(SampleState.QUARANTINED, "quarantined by a test")] * 2
        assert [(sample.state, sample.reason) for sample in found] == expected
        return
    assert {sample.state for sample in found} == {SampleState.OPEN}, "their episode has an outcome, too"
    await curate(harness.db, harness.settings)
    assert [sample.reward for sample in await samples_of(harness, refused)] == [1.0, 1.0]
    assert await assemble(harness.db, harness.settings) == 1
    assert {sample.state for sample in await samples_of(harness, others)} == {SampleState.BATCHED}
