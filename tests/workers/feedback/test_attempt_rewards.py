"""What an attempt of a group is rewarded with, and whose feedback is a part of it."""

import pytest
from sqlalchemy import select

from app.models import Rater, RaterStanding, Sample, SampleState, Turn
from app.raters import service
from tests.support import episodes
from tests.support.attempts import SOURCES, attempt, compare, read_samples
from tests.support.deployment import Harness
from workers.curate import curate
from workers.feedback.rewards import record_reward, update_turn_samples


async def turns_of(harness: Harness, episode_id: str) -> list[Turn]:
    async with harness.db.read() as session:
        query = (
            select(Turn).where(Turn.episode_id == episode_id).order_by(Turn.episode_step, Turn.choice_index, Turn.id)
        )
        return list(await session.scalars(query))


async def set_standing(harness: Harness, name: str, standing: RaterStanding) -> None:
    async with harness.db.write() as session:
        [project_id] = {turn.project_id for turn in await harness.all(Turn)}
        await service.set_standing(session, project_id, name, standing, None, actor="ada")


@pytest.mark.parametrize("quarantine_first", [True, False])
async def test_all_samples_of_an_attempt_wait_with_the_vote_of_a_quarantined_rater(
    harness: Harness, quarantine_first: bool
) -> None:
    """The vote is a part of the reward of every turn, also beside another person's vote, and of no other attempt."""
    compare(harness)
    first = await attempt(harness, 3)
    turns = await turns_of(harness, first["id"])
    if quarantine_first:
        await set_standing(harness, "HUMAN/mallory", RaterStanding.QUARANTINED)
    await harness.vote(turns[0].id, "up", source={"id": "ada"})
    await harness.vote(turns[1].id, "up", source={"id": "mallory"})
    await episodes.end(harness, first["id"], outcome=1.0)
    second = await attempt(harness, 1, -1.0)
    found = await read_samples(harness)
    if not quarantine_first:
        assert {sample.state for samples in found.values() for sample in samples} == {SampleState.OPEN}
        await set_standing(harness, "HUMAN/mallory", RaterStanding.QUARANTINED)
        found = await read_samples(harness)
    assert [sample.state for sample in found[first["id"]]] == 3 * [SampleState.QUARANTINED]
    assert [sample.state for sample in found[second["id"]]] == [SampleState.OPEN]
    await set_standing(harness, "HUMAN/mallory", RaterStanding.TRUSTED)
    found = await read_samples(harness)
    assert [sample.state for sample in found[first["id"]]] == 3 * [SampleState.OPEN]
    [rater] = [one for one in await harness.all(Rater) if one.name == "HUMAN/mallory"]
    assert rater.standing == RaterStanding.TRUSTED


async def test_blocked_rater_has_no_part_in_the_reward_of_an_attempt(harness: Harness) -> None:
    compare(harness)
    first = await attempt(harness, 2)
    turns = await turns_of(harness, first["id"])
    await harness.vote(turns[1].id, "down", source={"id": "mallory"})
    await episodes.end(harness, first["id"], outcome=1.0)
    await attempt(harness, 1, -1.0)
    assert {sample.reward for sample in (await read_samples(harness))[first["id"]]} == {0.0}
    await set_standing(harness, "HUMAN/mallory", RaterStanding.BLOCKED)
    found = (await read_samples(harness))[first["id"]]
    assert [(sample.state, sample.reward) for sample in found] == 2 * [(SampleState.OPEN, 1.0)]


async def test_choice_that_was_not_taken_is_not_called_withdrawn(harness: Harness) -> None:
    """Two choices of one chat; the vote is on the second, and the agent goes on from the first."""
    compare(harness)
    episode = await attempt(harness, 0)
    place = {"episode_id": episode["id"], "conversation_id": "c", "num_prompt_tokens": 3}
    taken = await harness.turn(episode_step=1, **place)
    other = await harness.turn(episode_step=1, choice_index=1, completion_id=taken.completion_id, **place)
    vote = {"completion_id": taken.completion_id, "choice_index": 1, "kind": "binary", "value": "down"}
    feedback_id = (await harness.api.post("/v1/feedback", json=vote)).json()["id"]
    await harness.turn(episode_step=2, parent_id=taken.id, prefix_reuse="exact", **place)
    await episodes.end(harness, episode["id"], outcome=1.0)
    await curate(harness.db, harness.settings)
    [sample] = [one for one in await harness.all(Sample) if one.turn_id == other.id]
    assert (sample.state, sample.rule) == (SampleState.DROPPED, "off_path")
    body = (await harness.api.get(f"/v1/feedback/{feedback_id}")).json()
    assert (body["outcome"]["state"], body["outcome"]["rule"]) == ("not_learned", "off_path")


async def test_judge_of_each_turn_adds_no_more_to_a_long_attempt(harness: Harness) -> None:
    """0.25 for every turn, and one thumb up, which counts in full."""
    compare(harness)
    judge = {"type": "rule", "name": "judge", "function": "ended"}
    assert (await harness.api.put("/v1/policies/shop/rewards", json={"sources": [*SOURCES, judge]})).status_code == 200
    attempts = [await attempt(harness, length) for length in (2, 6)]
    turns = {one["id"]: await turns_of(harness, one["id"]) for one in attempts}
    async with harness.db.write() as session:
        for turn in (turn for found in turns.values() for turn in found):
            await record_reward(session, turn.id, "judge", 0.25)
    for one, outcome in zip(attempts, (1.0, -1.0), strict=True):
        await episodes.end(harness, one["id"], outcome=outcome)
    await curate(harness.db, harness.settings)
    async with harness.db.write() as session:
        await update_turn_samples(session, [turns[attempts[0]["id"]][0].id], harness.settings)
    found = await read_samples(harness)
    assert [{sample.reward for sample in found[one["id"]]} for one in attempts] == [{1.25}, {-0.75}]
