"""Every piece of feedback has exactly one outcome, on both databases."""

import random
from collections import Counter
from typing import Any

import pytest
from sqlalchemy import select, update

from app.feedback import settled_votes
from app.feedback.outcome_reasons import REASONS, SENTENCES, Reason, state_of
from app.feedback.vote_counts import count_votes
from app.models import (
    VOTE_KINDS,
    ApiKey,
    Batch,
    BatchState,
    Feedback,
    LearningMode,
    Policy,
    Project,
    RaterStanding,
    Reward,
    Sample,
    SampleRule,
    SampleState,
    Turn,
    TurnState,
    Version,
    VersionState,
)
from app.policies.locks import lock_policy
from app.raters import service as raters
from app.training import batch_samples
from tests.support.deployment import Harness
from tests.support.trained_versions import create_batch, create_version
from tests.support.updates import TRAINED, claim_next_batch, deploy, release, roll_back
from workers.curate import curate
from workers.feedback.rewards import record_reward, update_turn_samples
from workers.training import batches
from workers.training.assemble import assemble

RELEASED = (VersionState.CANARY, VersionState.LIVE, VersionState.SUPERSEDED)
UNRELEASED = (VersionState.TRAINED, VersionState.VERIFIED, VersionState.SHADOW, VersionState.SHADOW_PASSED)


async def submit(harness: Harness, **body: Any) -> str:
    response = await harness.api.post("/v1/feedback", json=body)
    assert response.status_code == 201, response.text
    assert response.json().get("outcome") is None
    feedback_id: str = response.json()["id"]
    await curate(harness.db, harness.settings)
    return feedback_id


async def vote(harness: Harness, turn: Turn, value: str = "up", **fields: Any) -> str:
    return await submit(harness, completion_id=turn.id, kind="binary", value=value, **fields)


async def read(harness: Harness, feedback_id: str) -> dict[str, Any]:
    response = await harness.api.get(f"/v1/feedback/{feedback_id}")
    assert response.status_code == 200, response.text
    outcome: dict[str, Any] = response.json()["outcome"]
    return outcome


async def read_reason(harness: Harness, feedback_id: str) -> tuple[str, str]:
    outcome = await read(harness, feedback_id)
    assert outcome["sentence"]
    return outcome["state"], outcome["waiting_for"] or outcome["rule"] or "learned"


async def change(harness: Harness, model: type[Any], **values: Any) -> None:
    async with harness.db.write() as session:
        await session.execute(update(model).values(**values))


def test_every_reason_has_a_sentence_and_a_state() -> None:
    assert SENTENCES.keys() == set(REASONS)
    assert Counter(state_of(reason) for reason in REASONS) == {"learned": 1, "waiting": 14, "not_learned": 16}
    assert {Reason(rule) for rule in SampleRule} <= set(REASONS)


@pytest.mark.parametrize(
    ("version_state", "expected"),
    [
        *((state, ("learned", "learned")) for state in RELEASED),
        *((state, ("waiting", "release")) for state in UNRELEASED),
        (VersionState.ROLLED_BACK, ("not_learned", "rolled_back")),
        (VersionState.REJECTED, ("not_learned", "version_rejected")),
    ],
)
async def test_a_batch_decides_by_the_state_of_its_version(
    harness: Harness, version_state: VersionState, expected: tuple[str, str]
) -> None:
    turn = await harness.turn()
    feedback_id = await vote(harness, turn)
    version = await create_version(harness, turn, state=version_state)
    await change(harness, Feedback, batch_id=version.batch_id)
    await harness.api.delete(f"/v1/feedback/{feedback_id}")  # what was learned stays learned
    outcome = await read(harness, feedback_id)
    assert (await read_reason(harness, feedback_id)) == expected
    assert (outcome["version"], outcome["batch"], outcome["until"]) == ("shop@v1", version.batch_id, None)


async def test_feedback_waits_for_its_processing_the_batch_and_the_training(harness: Harness) -> None:
    turn = await harness.turn(state=TurnState.OPEN)
    feedback_id = await vote(harness, turn)
    assert await read_reason(harness, feedback_id) == ("waiting", "reply_unfinished")
    await change(harness, Turn, state=TurnState.DONE)
    assert await read_reason(harness, feedback_id) == ("waiting", "processing")
    await curate(harness.db, harness.settings)
    assert await read_reason(harness, feedback_id) == ("waiting", "batch")
    await change(harness, Policy, mode=LearningMode.HALTED)
    assert await read_reason(harness, feedback_id) == ("waiting", "resume")
    await change(harness, Policy, mode=LearningMode.ASYNCHRONOUS)
    await change(harness, Sample, ready_at=9e9)
    outcome = await read(harness, feedback_id)
    assert (outcome["waiting_for"], outcome["until"]) == ("other_sources", 9e9)
    await change(harness, Sample, state=SampleState.QUARANTINED, reason="a burst")
    outcome = await read(harness, feedback_id)
    assert outcome["waiting_for"] == "admin_review" and "a burst" in outcome["sentence"]
    batch = await create_batch(harness, turn)
    await change(harness, Feedback, batch_id=batch.id)
    outcome = await read(harness, feedback_id)
    assert (outcome["waiting_for"], outcome["batch"], outcome["version"]) == ("training", batch.id, None)
    # The batch is broken up, and its samples are open again.
    await change(harness, Batch, state=BatchState.REFUSED)
    await change(harness, Sample, state=SampleState.OPEN, ready_at=0.0, batch_id=None)
    assert await read_reason(harness, feedback_id) == ("waiting", "batch")


async def test_a_vote_without_consent_waits_for_consent(harness: Harness) -> None:
    feedback_id = await vote(harness, await harness.turn())
    for body, expected in (({"train": False}, "consent"), ({"train": True}, "batch")):
        await change(harness, Project, **body)
        assert await read_reason(harness, feedback_id) == ("waiting", expected)
    await change(harness, ApiKey, train=False)
    assert await read_reason(harness, feedback_id) == ("waiting", "batch"), "the turn has no key"
    async with harness.db.write() as session:
        key_id = await session.scalar(select(ApiKey.id))
        await session.execute(update(Turn).values(key_id=key_id))
    assert await read_reason(harness, feedback_id) == ("waiting", "consent")


@pytest.mark.parametrize("reason", batch_samples.WAITS_FOR_NEW)
async def test_a_vote_in_a_batch_that_is_not_repeated_waits_for_newer_feedback(harness: Harness, reason: str) -> None:
    feedback_id = await vote(harness, await harness.turn())
    await change(harness, Sample, reason=reason)
    assert await read_reason(harness, feedback_id) == ("waiting", "new_feedback")


async def test_a_vote_is_not_learned_from_where_the_rewards_do_not_use_feedback(harness: Harness) -> None:
    """Its reply is trained on with the reward of a rule, and a rule alone."""
    config = {"sources": [{"type": "rule", "name": "length", "function": "length"}]}
    assert (await harness.api.put("/v1/policies/shop/rewards", json=config)).status_code == 200
    turns = [await harness.turn() for _ in range(8)]
    ids = [await vote(harness, turn) for turn in turns]
    async with harness.db.write() as session:
        for number, turn in enumerate(turns):
            await record_reward(session, turn.id, "length", 1.0 if number % 2 else -1.0)
        await update_turn_samples(session, [turn.id for turn in turns], harness.settings)
    assert {await read_reason(harness, id) for id in ids} == {("not_learned", "not_used")}
    claimed = await claim_next_batch(harness)
    assert {row.batch_id for row in await harness.all(Feedback)} == {None}
    assert {await read_reason(harness, id) for id in ids} == {("not_learned", "not_used")}
    assert await batches.commit(harness.db, claimed, TRAINED)
    [version] = [row for row in await harness.all(Version) if row.batch_id is not None]
    await release(harness, version)
    votes = (await harness.api.get("/v1/policies/shop/votes")).json()
    assert (votes["total"], votes["learned"], votes["not_learned"]) == (8, 0, 8)
    await roll_back(harness)
    await deploy(harness, 1)  # the version takes its samples back, and no feedback
    assert {row.batch_id for row in await harness.all(Feedback)} == {None}


async def test_replaced_withdrawn_and_late_feedback_is_not_learned_from(harness: Harness) -> None:
    turn = await harness.turn()
    replaced, withdrawn = await vote(harness, turn), await vote(harness, turn, source={"id": "bob"})
    latest = await vote(harness, turn, "down")
    answer = (await harness.api.delete(f"/v1/feedback/{withdrawn}")).json()
    assert answer["outcome"] == await read(harness, withdrawn)
    assert await read_reason(harness, replaced) == ("not_learned", "replaced")
    assert await read_reason(harness, withdrawn) == ("not_learned", "withdrawn")
    assert await read_reason(harness, latest) == ("waiting", "batch")
    await create_batch(harness, turn)
    assert await read_reason(harness, await vote(harness, turn, source={"id": "eve"})) == ("not_learned", "too_late")


@pytest.mark.parametrize("rule", SampleRule)
async def test_a_dropped_sample_says_by_which_rule(harness: Harness, rule: SampleRule) -> None:
    feedback_id = await vote(harness, await harness.turn())
    await change(harness, Sample, state=SampleState.DROPPED, rule=rule, reason="a reason")
    assert await read_reason(harness, feedback_id) == ("not_learned", rule)


async def test_excluded_deleted_and_shadow_replies_are_not_learned_from(harness: Harness) -> None:
    excluded = await vote(harness, await harness.turn(exclusion_reason="greedy sampling"))
    outcome = await read(harness, excluded)
    assert outcome["rule"] == "excluded" and "greedy sampling" in outcome["sentence"]
    turn = await harness.turn()
    deleted = await vote(harness, turn)
    assert (await harness.api.delete(f"/v1/chat/completions/{turn.id}")).status_code == 200
    assert await read_reason(harness, deleted) == ("not_learned", "erased")
    shadow = await harness.turn()
    feedback_id = await vote(harness, shadow)
    async with harness.db.write() as session:
        (await session.get_one(Turn, shadow.id)).origin = "shadow"
    assert await read_reason(harness, feedback_id) == ("not_learned", "excluded")


async def test_feedback_without_a_reward_is_not_learned_from(harness: Harness) -> None:
    turn = await harness.turn(conversation_id="c")
    comment = await submit(harness, completion_id=turn.id, kind="comment", value="thanks")
    label = await submit(harness, completion_id=turn.id, kind="categorical", value="greeting")
    about_all = await submit(harness, target={"conversation_id": "c"}, kind="comment", value="thanks")
    for feedback_id in (comment, label, about_all):
        assert await read_reason(harness, feedback_id) == ("not_learned", "no_reward")
    failed = await vote(harness, turn)
    async with harness.db.write() as session:
        await session.delete(await session.scalar(select(Reward)))
    assert await read_reason(harness, failed) == ("not_learned", "unprocessable")


async def test_feedback_of_a_blocked_rater_is_not_learned_from(harness: Harness) -> None:
    project_id = (await harness.policy()).project_id
    turn = await harness.turn()
    before = await vote(harness, turn, source={"id": "eve"})
    async with harness.db.write() as session:
        await raters.set_standing(session, project_id, "HUMAN/eve", RaterStanding.BLOCKED, None, actor="test")
    after = await vote(harness, await harness.turn(), source={"id": "eve"})
    other = await vote(harness, turn, source={"id": "ada"})
    assert await read_reason(harness, before) == await read_reason(harness, after) == ("not_learned", "rater_blocked")
    assert (await read_reason(harness, other))[0] != "learned"


async def test_the_best_reply_decides_for_rankings_and_conversations(harness: Harness) -> None:
    first, second = [await harness.turn(conversation_id="c") for _ in range(2)]
    ranking = await submit(harness, kind="comparison", value=[first.id, second.id])
    conversation = await submit(harness, kind="score", value=1, target={"conversation_id": "c"})
    async with harness.db.write() as session:
        sample = await session.get_one(Sample, first.id)
        sample.state, sample.rule = SampleState.DROPPED, SampleRule.TOO_OLD
    for feedback_id in (ranking, conversation):
        assert await read_reason(harness, feedback_id) == ("waiting", "batch")
    await change(harness, Sample, state=SampleState.DROPPED, rule=SampleRule.TOO_OLD)
    later = await harness.turn(conversation_id="c", state=TurnState.OPEN)
    assert later.conversation_id == "c"
    for feedback_id in (ranking, conversation):
        assert await read_reason(harness, feedback_id) == ("not_learned", "too_old")


async def test_lists_have_the_outcomes_of_single_reads(harness: Harness) -> None:
    turn = await harness.turn(conversation_id="c")
    ids = [await vote(harness, turn, source={"id": f"u{number}"}) for number in range(3)]
    ids.append(await submit(harness, kind="score", value=1, target={"conversation_id": "c"}))
    page = (await harness.api.get("/v1/feedback", params={"conversation_id": "c"})).json()["data"]
    assert [row["outcome"] for row in page] == [await read(harness, id) for id in ids]


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
async def test_the_counts_are_those_of_the_single_outcomes_and_add_up(harness: Harness, seed: int) -> None:
    """Votes of every kind in random states: each is counted once, with the outcome that it has when it is read."""
    rng = random.Random(seed)
    versions = [await create_version(harness, await harness.turn(), state=state) for state in VersionState]
    open_batch = await create_batch(harness, await harness.turn())
    turns = [await harness.turn(conversation_id=f"c{number % 5}") for number in range(24)]
    sources = [{"id": "ada"}, {"id": "bob"}, {"kind": "CODE", "id": "tests"}, {"kind": "LLM_JUDGE"}]
    ids = []
    for number in range(60):
        one, two = rng.sample(turns, 2)
        body: dict[str, Any] = rng.choice(
            [
                {"completion_id": one.id, "kind": "binary", "value": rng.random() < 0.5},
                {"completion_id": one.id, "kind": "correction", "value": "better"},
                {"completion_id": one.id, "kind": "categorical", "value": "greeting"},
                {"completion_id": one.id, "kind": "comment", "value": "thanks"},
                {"target": {"conversation_id": one.conversation_id}, "kind": "score", "value": 0.5},
                {"kind": "comparison", "value": [one.id, two.id]},
            ]
        )
        response = await harness.api.post("/v1/feedback", json=body | {"source": rng.choice(sources)})
        assert response.status_code == 201, response.text
        ids.append(response.json()["id"])
        if number % 9 == 8:
            await harness.api.delete(f"/v1/feedback/{rng.choice(ids)}")
        if number == 40:
            await curate(harness.db, harness.settings)
    batch_ids = [None, None, open_batch.id, *(version.batch_id for version in versions)]
    async with harness.db.write() as session:
        for row in list(await session.scalars(select(Feedback))):
            row.batch_id = rng.choice(batch_ids) if row.kind != "withdrawal" and rng.random() < 0.3 else None
        for sample in list(await session.scalars(select(Sample))):
            sample.state = rng.choice(list(SampleState))
            sample.rule = rng.choice([None, *SampleRule]) if sample.state == SampleState.DROPPED else None
            sample.ready_at = rng.choice([0.0, 9e9])
        for turn in rng.sample(turns, 4):
            stored = await session.get_one(Turn, turn.id)
            stored.state, stored.deleted_at = rng.choice(list(TurnState)), rng.choice([None, 1.0])
    policy = await harness.policy()
    async with harness.db.read() as session:
        counts = await count_votes(session, policy.project_id, [policy.id])
        votes = list(
            await session.scalars(select(Feedback).where(Feedback.kind.in_(VOTE_KINDS)).order_by(Feedback.seq))
        )
    assert sum(count.num_votes for count in counts) == len(votes)
    expected: Counter[tuple[str, bool]] = Counter()
    for vote in votes:
        expected[(await read_reason(harness, vote.id))[1], vote.source_kind == "HUMAN"] += 1
    counted: Counter[tuple[str, bool]] = Counter()
    for count in counts:
        counted[count.reason, count.is_person] += count.num_votes
    assert counted == expected and len(expected) > 8
    assert await settled_votes.count_settled_votes(harness.db, harness.settings) > 0
    async with harness.db.read() as session:
        counts = await count_votes(session, policy.project_id, [policy.id])
    assert Counter({(count.reason, count.is_person): count.num_votes for count in counts}) == expected


async def test_other_projects_and_policies_are_not_counted(harness: Harness) -> None:
    await vote(harness, await harness.turn())
    policy = await harness.policy()
    async with harness.db.read() as session:
        assert await count_votes(session, policy.project_id, ["another"]) == []
        assert await count_votes(session, "another", [policy.id]) == []
        assert [row.num_votes for row in await count_votes(session, policy.project_id, [policy.id])] == [1]


async def test_a_late_vote_counts_when_the_samples_return(harness: Harness) -> None:
    turns = [await harness.turn() for _ in range(8)]
    ids = [await vote(harness, turn, "up" if number % 2 else "down") for number, turn in enumerate(turns)]
    assert await assemble(harness.db, harness.settings) == 1
    late = await vote(harness, turns[0], source={"id": "eve"})
    assert {await read_reason(harness, id) for id in ids} == {("waiting", "training")}
    assert await read_reason(harness, late) == ("not_learned", "too_late")
    [batch] = await harness.all(Batch)
    async with harness.db.write() as session:
        locked = await lock_policy(session, batch.policy_id)
        await batch_samples.break_up_batches(locked, [batch.id], BatchState.FAILED, "a test")
    await curate(harness.db, harness.settings)
    assert {await read_reason(harness, id) for id in [*ids, late]} == {("waiting", "batch")}
