"""What is learned from an episode by how it has ended: the table of docs/episodes.md, `The end`."""

from typing import Any

import pytest

from app.chat.episode_limits import end_at_limit
from app.models import EndReason, Feedback, Sample, SampleState, Turn
from tests.support import episodes
from tests.support.attempts import SOURCES, attempt, compare, read_samples
from tests.support.deployment import Harness
from workers.curate import curate
from workers.feedback.rewards import record_reward, update_turn_samples

RULE = {"type": "rule", "name": "judge", "function": "ended"}


async def configure(harness: Harness, **rewards: Any) -> None:
    answer = await harness.api.put("/v1/policies/shop/rewards", json={"sources": [*SOURCES, RULE], **rewards})
    assert answer.status_code == 200, answer.text


async def end_by_limit(harness: Harness, episode: dict[str, Any], reason: str) -> None:
    """Let the service end the episode."""
    await harness.db.run_write(lambda connection: end_at_limit(connection, [episode["id"]], EndReason(reason)))


async def judge(harness: Harness, value: float = 0.5) -> None:
    """Let an automated source judge all turns."""
    async with harness.db.write() as session:
        ids = [turn.id for turn in await harness.all(Turn)]
        for id in ids:
            await record_reward(session, id, "judge", value)
        await update_turn_samples(session, ids, harness.settings)


async def rewards(harness: Harness) -> list[float | str | None]:
    """Curate, and return the reward of each turn in order; why it is not learned from, or None without a sample."""
    await curate(harness.db, harness.settings)
    samples = {sample.turn_id: sample for sample in await harness.all(Sample)}
    found: list[float | str | None] = []
    for turn in sorted(await harness.all(Turn), key=lambda turn: turn.episode_step or 0):
        sample = samples.get(turn.id)
        is_open = sample is not None and sample.state == SampleState.OPEN
        found.append(None if sample is None else sample.reward if is_open else sample.rule)
    return found


LIMIT_REASONS = ("max_turns", "max_tokens", "deadline")


@pytest.mark.parametrize(
    ("report", "own", "expected"),
    [
        ({"outcome": 0.5}, {}, 0.5),
        ({}, {}, None),
        *(({"outcome": 0.5, "reason": reason}, {}, 0.0) for reason in LIMIT_REASONS),
        *(({"outcome": -0.5, "reason": reason}, {}, -0.5) for reason in LIMIT_REASONS),
        ({"outcome": 0.5, "reason": "deadline"}, {"episode_limit_cap": -0.25}, -0.25),
        ({"outcome": 0.5, "reason": "deadline"}, {"episode_limit_cap": None}, 0.5),
        ({"reason": "max_turns"}, {}, None),
        ({"reason": "failed"}, {}, -1.0),
        ({"reason": "failed", "outcome": 0.25}, {}, 0.25),
        ({"reason": "failed"}, {"episode_failure": -0.5}, -0.5),
        ({"reason": "failed"}, {"episode_failure": None}, None),
        ({"reason": "abandoned"}, {}, None),
        ({"reason": "infrastructure"}, {}, None),
    ],
    ids=str,
)
@pytest.mark.parametrize("credit", ["outcome", "return"])
async def test_reward_of_an_end(
    harness: Harness, report: dict[str, Any], own: dict[str, Any], expected: float | None, credit: str
) -> None:
    await configure(harness, episode_credit=credit, episode_discount=1.0, **own)
    episode = await attempt(harness, 2, group=None)
    answer = await episodes.end(harness, episode["id"], **report)
    assert answer.status_code == 200, answer.text
    assert answer.json()["end_reason"] == report.get("reason", "completed")
    assert answer.json()["outcome"] == report.get("outcome"), "as it was reported"
    assert await rewards(harness) == [expected, expected]


@pytest.mark.parametrize("reason", LIMIT_REASONS)
async def test_end_by_a_limit_of_the_service_changes_nothing_unless_the_report_says_so(
    harness: Harness, reason: str
) -> None:
    await configure(harness)
    for report in ({"outcome": 0.5}, {"outcome": 0.5, "reason": reason}, {"reason": "failed"}):
        episode = await attempt(harness, 1, group=None)
        await end_by_limit(harness, episode, reason)
        ended = await episodes.end(harness, episode["id"], **report)
        assert ended.json()["end_reason"] == reason
    samples = await read_samples(harness)
    assert sorted(sample.reward for [sample] in samples.values()) == [-1.0, 0.0, 0.5]


async def test_late_grade_of_a_limited_episode_has_the_cap_and_that_of_a_person_has_none(harness: Harness) -> None:
    await configure(harness)
    episode = await attempt(harness, 1, group=None)
    await episodes.end(harness, episode["id"], reason="max_turns")
    grade = {"kind": "score", "value": 1.0, "name": "outcome", "source": {"kind": "CODE", "id": "episode"}}
    target = {"target": {"episode_id": episode["id"]}}
    assert (await harness.api.post("/v1/feedback", json=grade | target)).status_code == 201
    assert await rewards(harness) == [0.0]
    vote = {"kind": "binary", "value": "up", "source": {"kind": "HUMAN", "id": "ada"}, **target}
    assert (await harness.api.post("/v1/feedback", json=vote)).status_code == 201
    [reward] = await rewards(harness)
    assert isinstance(reward, float) and 0.0 < reward < 1.0


async def test_outcome_of_a_lost_attempt_is_refused(harness: Harness) -> None:
    episode = await attempt(harness, 1, group=None)
    answer = await episodes.end(harness, episode["id"], reason="infrastructure", outcome=-1.0)
    assert answer.status_code == 400


async def test_failure_has_no_outcome_where_the_key_may_report_none(harness: Harness) -> None:
    """Else a key for chats alone could give negative rewards."""
    await configure(harness)
    chats_only = (await harness.api.post("/v1/keys", json={"scopes": ["chat"]})).json()["key"]
    created = await harness.api.post("/v1/episodes", json={"policy": "shop"}, headers=episodes.auth(chats_only))
    episode = created.json()
    await harness.turn(episode_id=episode["id"], episode_step=1)
    url = f"/v1/episodes/{episode['id']}/end"
    ended = await harness.api.post(url, json={"reason": "failed"}, headers=episodes.auth(chats_only))
    assert ended.status_code == 200, ended.text
    assert await rewards(harness) == [None] and await harness.all(Feedback) == []


@pytest.mark.parametrize("credit", ["outcome", "return"])
@pytest.mark.parametrize(
    ("reason", "with_vote", "expected"),
    [
        ("completed", False, [0.5, 0.5]),
        ("idle_timeout", False, [0.5, 0.5]),
        ("abandoned", False, ["attempt_lost", "attempt_lost"]),
        ("infrastructure", False, ["attempt_lost", "attempt_lost"]),
        ("abandoned", True, [None, None]),
        ("infrastructure", True, ["attempt_lost", "attempt_lost"]),
    ],
)
async def test_judged_turns_of_a_lost_attempt_are_not_learned_from(
    harness: Harness, credit: str, reason: str, with_vote: bool, expected: list[Any]
) -> None:
    """Unless a person has judged it: here, the last turn of an abandoned one."""
    await configure(harness, episode_credit=credit, episode_discount=1.0)
    episode = await attempt(harness, 2, group=None)
    turns = sorted(await harness.all(Turn), key=lambda turn: turn.episode_step or 0)
    await judge(harness)
    if with_vote:
        await harness.vote(turns[1].id, "up", source={"id": "ada"})
        await curate(harness.db, harness.settings)
    if reason == "idle_timeout":
        await end_by_limit(harness, episode, reason)
    else:
        await episodes.end(harness, episode["id"], reason=reason)
    found = await rewards(harness)
    if with_vote and reason == "abandoned":
        # With outcomes, the turn that a person judged; with returns, what leads to it, too.
        assert isinstance(found[1], float)
        assert isinstance(found[0], float) if credit == "return" else found[0] == "attempt_lost"
    elif credit == "return" and not isinstance(expected[0], str):
        assert found == [1.0, 0.5]
    else:
        assert found == expected


async def test_vote_on_an_abandoned_attempt_lets_its_turn_be_learned_from(harness: Harness) -> None:
    await configure(harness)
    episode = await attempt(harness, 1, group=None)
    await judge(harness)
    await episodes.end(harness, episode["id"], reason="abandoned")
    assert await rewards(harness) == ["attempt_lost"]
    [turn] = await harness.all(Turn)
    await harness.vote(turn.id, "up", source={"id": "ada"})
    [reward] = await rewards(harness)
    assert isinstance(reward, float) and reward > 0.5


@pytest.mark.parametrize("reason", ["abandoned", "infrastructure"])
async def test_lost_attempt_has_no_part_in_the_baseline_of_its_group(harness: Harness, reason: str) -> None:
    """Although its turns were judged; and the others wait for a replacement."""
    compare(harness)
    await configure(harness)
    for outcome in (1.0, -1.0):
        await attempt(harness, 1, outcome, group={"id": "g", "size": 3})
    lost = await attempt(harness, 2, group={"id": "g", "size": 3})
    await judge(harness)
    await episodes.end(harness, lost["id"], reason=reason)
    found = await read_samples(harness)
    assert {sample.rule for sample in found.pop(lost["id"])} == {"attempt_lost"}
    assert all(sample.ready_at > sample.created_at + 3000 for [sample] in found.values())
    await attempt(harness, 1, 0.0, group={"id": "g", "size": 3})
    found = await read_samples(harness)
    opened = {id: samples for id, samples in found.items() if samples[0].state == SampleState.OPEN}
    assert len(opened) == 3 and lost["id"] not in opened
    assert all(sample.ready_at < sample.created_at + 3000 for [sample] in opened.values())
