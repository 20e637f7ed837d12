"""A reward model's life on record: opened, claimed, committed once, silenced when people disagree, fitted anew."""

import asyncio
from typing import Any

import pytest
from sqlalchemy import select, update

from app.core import leases
from app.models import (
    Audit,
    Feedback,
    Judgement,
    JudgementState,
    Rater,
    RaterStanding,
    Reward,
    RewardModel,
    RewardModelState,
    RewardModelTurn,
    Turn,
    new_id,
)
from app.training.reward_models import agreement
from tests.support.deployment import Harness
from tests.support.human_feedback import learning, model, said, spoken
from workers.reconcile import reconcile
from workers.training import reward_models

METRICS = {"agreement": 0.9}
DONE = {"path": "/nowhere/rm", "manifest_sha256": "1" * 64, "metrics": METRICS}


async def states(harness: Harness) -> list[tuple[int, str]]:
    async with harness.db.read() as session:
        rows = await session.scalars(select(RewardModel).order_by(RewardModel.number))
        return [(row.number, row.state) for row in rows]


async def judged(harness: Harness, turn: Turn, value: float, row: RewardModel) -> None:
    """What the model said of it."""
    async with harness.db.write() as session:
        session.add(
            Judgement(
                id=new_id("jdg"),
                turn_id=turn.id,
                policy_id=turn.policy_id,
                source="learned",
                state=JudgementState.DONE,
                due_at=0.0,
                value=value,
                details={"reward_model": row.id, "number": row.number},
            )
        )


async def test_a_first_fit_is_opened_when_enough_is_said_and_once(harness: Harness) -> None:
    settings = learning(harness)
    await spoken(harness, 39)
    await reward_models.reconcile(harness.db, settings)
    assert await states(harness) == []
    await spoken(harness, 1, seed=1)
    for _ in range(2):
        await reward_models.reconcile(harness.db, settings)
    assert await states(harness) == [(1, "open")]
    async with harness.db.read() as session:
        [told] = await session.scalars(select(Audit).where(Audit.action == "fit reward model"))
    assert (told.actor, told.subject) == ("sweep", "shop/rm-1")


async def test_a_policy_that_does_not_listen_to_one_gets_none(harness: Harness) -> None:
    await spoken(harness, 50)
    await reward_models.reconcile(harness.db, harness.settings)
    assert await states(harness) == []


async def test_what_machines_say_opens_nothing(harness: Harness) -> None:
    await spoken(harness, 50)
    async with harness.db.write() as session:
        await session.execute(update(Feedback).values(source_kind="CODE"))
    await reward_models.reconcile(harness.db, learning(harness))
    assert await states(harness) == []


async def claimed(harness: Harness, **source: Any) -> reward_models.Claimed:
    settings = learning(harness, **source)
    await reward_models.reconcile(harness.db, settings)
    row = await reward_models.claim(harness.db, "me", settings)
    assert row is not None
    return row


async def test_what_is_learned_from_is_people_s_words_about_replies_that_may_be(harness: Harness) -> None:
    turns = await spoken(harness, 44)
    async with harness.db.write() as session:
        project = turns[0].project_id
        session.add(Rater(project_id=project, name="HUMAN/0-0", standing=RaterStanding.QUARANTINED))
        session.add(Rater(project_id=project, name="HUMAN/0-1", standing=RaterStanding.BLOCKED))
        (await session.get_one(Turn, turns[2].id)).exclusion_reason = "sampling was greedy"
        (await session.get_one(Turn, turns[3].id)).deleted_at = 1.0
        (await session.get_one(Turn, turns[4].id)).prompt_ids = None
        rows = {row.turn_id: row for row in await session.scalars(select(Reward))}
        rows[turns[5].id].rater = "CODE/linter"
        rows[turns[6].id].weight = 0.0
        rows[turns[7].id].source = "conversation/default/HUMAN/0-7"
        rows[turns[8].id].weight = 0.4
    words = (await claimed(harness)).words
    known = {words.replies[thumb.reply].turn_id: thumb for thumb in words.thumbs}
    assert set(known) == {turn.id for turn in turns[8:]}
    assert known[turns[8].id].weight == 0.4 and known[turns[9].id].rater == "HUMAN/0-9"
    row = (await harness.all(RewardModel))[0]
    assert (row.num_thumbs, row.num_pairs, row.num_raters) == (36, 0, 36)
    assert {one.turn_id for one in await harness.all(RewardModelTurn)} == set(known)


async def test_orders_become_pairs_of_replies_to_one_prompt(harness: Harness) -> None:
    await spoken(harness, 40)
    same, other = {"prompt_ids": [1, 2]}, {"prompt_ids": [1, 3]}
    turns = [
        await harness.turn(**same),
        await harness.turn(**same),
        await harness.turn(**same),
        await harness.turn(**other),
    ]
    order = {"source": "ranking/default/HUMAN/ada/t", "rater": "HUMAN/ada"}
    for turn, value in zip(turns, (1.0, 0.0, 0.0, -1.0), strict=True):
        await said(harness, turn, value, "ada", **order)
    words = (await claimed(harness)).words
    told = {(words.replies[p.chosen].turn_id, words.replies[p.rejected].turn_id): p.weight for p in words.pairs}
    assert told == {(turns[0].id, turns[1].id): pytest.approx(2 / 3), (turns[0].id, turns[2].id): pytest.approx(2 / 3)}
    assert len(words.thumbs) == 40


async def test_the_fitted_one_serves_and_the_one_before_is_retired(harness: Harness) -> None:
    await spoken(harness, 40)
    first = await claimed(harness)
    assert await reward_models.commit(harness.db, first, **DONE) == "serving"
    await spoken(harness, 10, seed=1)
    second = await claimed(harness, refit_after=10)
    assert (await reward_models.commit(harness.db, second, **DONE)) == "serving"
    assert await states(harness) == [(1, "retired"), (2, "serving")]
    row = await harness.get(RewardModel, second.id)
    assert (row.path, row.metrics, row.attempt) == ("/nowhere/rm", METRICS, 1) and row.served_at is not None
    assert row.lease_until is None


async def test_one_that_is_not_good_enough_is_refused_and_the_one_before_goes_on(harness: Harness) -> None:
    before = await model(harness)
    await spoken(harness, 10)
    tried = await claimed(harness, refit_after=10)
    await reward_models.refuse(harness.db, tried, "it agrees in 40%", {"agreement": 0.4})
    assert await states(harness) == [(1, "serving"), (2, "refused")]
    assert (await harness.get(RewardModel, tried.id)).reason == "it agrees in 40%"
    assert (await harness.get(RewardModel, before.id)).state == "serving"
    settings = learning(harness, refit_after=10)
    await spoken(harness, 9, seed=1)
    await reward_models.reconcile(harness.db, settings)
    assert len(await states(harness)) == 2, "it is not tried again on the same words"
    await spoken(harness, 1, seed=2)
    await reward_models.reconcile(harness.db, settings)
    assert (await states(harness))[-1] == (3, "open")


async def test_of_two_trainers_one_has_the_fit_and_a_late_one_cannot_commit(harness: Harness) -> None:
    await spoken(harness, 40)
    settings = learning(harness)
    await reward_models.reconcile(harness.db, settings)
    both = await asyncio.gather(*(reward_models.claim(harness.db, name, settings) for name in "ab"))
    [late] = [one for one in both if one is not None]
    async with harness.db.write() as session:  # it was killed after its export, before its commit
        await session.execute(update(RewardModel).values(lease_until=0.0))
    again = await reward_models.claim(harness.db, "c", settings)
    assert again is not None and again.id == late.id and (again.attempt, again.fence) == (2, 2)
    assert again.directory(settings) != late.directory(settings), "what the dead one wrote is not in the way"
    with pytest.raises(leases.LeaseLost):
        await reward_models.commit(harness.db, late, **DONE)
    with pytest.raises(leases.LeaseLost):
        await reward_models.refuse(harness.db, late, "no", {})
    assert await states(harness) == [(1, "open")]
    assert await reward_models.commit(harness.db, again, **DONE) == "serving"


async def test_one_that_takes_the_trainer_down_again_and_again_is_failed_with_the_last_reason(harness: Harness) -> None:
    await spoken(harness, 40)
    settings = learning(harness)
    await reward_models.reconcile(harness.db, settings)
    for _ in range(settings.max_attempts):
        taken = await reward_models.claim(harness.db, "me", settings)
        assert taken is not None
        await reward_models.note_failure(harness.db, taken, "MemoryError: no more")
        async with harness.db.write() as session:
            await session.execute(update(RewardModel).values(lease_until=0.0))
    assert await reward_models.claim(harness.db, "me", settings) is None
    await reward_models.reconcile(harness.db, settings)
    row = (await harness.all(RewardModel))[0]
    assert (row.state, row.actor) == ("failed", "reconcile")
    assert row.reason == "3 attempts ended without a result; the last one: MemoryError: no more"


async def test_whom_people_contradict_is_silenced_and_fitted_anew(harness: Harness) -> None:
    row = await model(harness)
    turns = await spoken(harness, 60)
    settings = learning(harness, refit_after=1000)
    for number, turn in enumerate(turns):
        await judged(harness, turn, -0.5 if number % 2 else 0.5, row)  # always the contrary
    await reconcile(harness.db, settings)
    assert await states(harness) == [(1, "disabled"), (2, "open")]
    silenced = await harness.get(RewardModel, row.id)
    assert (
        silenced.reason.startswith("it agrees with people in 0% of their last 60 words")
        and silenced.actor == "reconcile"
    )
    async with harness.db.read() as session:
        actions = set(await session.scalars(select(Audit.action)))
    assert {"reward model silenced", "fit reward model"} <= actions


@pytest.mark.parametrize(("right", "words"), [(0, 28), (24, 60), (60, 60)])
async def test_few_words_and_chance_silence_nobody(harness: Harness, right: int, words: int) -> None:
    row = await model(harness)
    for number, turn in enumerate(await spoken(harness, words)):
        up = bool(number % 2)
        agrees = number < right
        await judged(harness, turn, 0.5 if up == agrees else -0.5, row)
    policy = await harness.policy()
    async with harness.db.read() as session:
        counted = await agreement.measured(session, policy, row)
    assert counted.words == words and counted.share == pytest.approx(right / words)
    assert agreement.contrary(counted, 0.6) is None


async def test_only_what_was_said_since_and_of_what_it_judged_itself_counts(harness: Harness) -> None:
    row = await model(harness)
    other = await model(harness, RewardModelState.RETIRED)
    turns = await spoken(harness, 4)
    await judged(harness, turns[0], 0.5, row)
    await judged(harness, turns[1], 0.5, other)
    await judged(harness, turns[2], 0.5, row)
    policy = await harness.policy()
    async with harness.db.write() as session:
        [old] = await session.scalars(select(Reward).where(Reward.turn_id == turns[2].id))
        old.created_at = 0.5
        (await session.get_one(RewardModel, row.id)).served_at = 1.0
    async with harness.db.read() as session:
        row = await session.get_one(RewardModel, row.id)
        counted = await agreement.measured(session, policy, row)
    assert (counted.words, counted.downs) == (1, 1)


async def test_an_operator_s_word_holds_until_an_operator_takes_it_back(harness: Harness) -> None:
    settings = learning(harness, refit_after=5)
    await model(harness)
    await spoken(harness, 10)
    async with harness.db.write() as session:
        policy = await session.merge(await harness.policy())
        under_way = await reward_models.service.open_fit(session, policy, actor="reconcile", reason=None)
        [row] = await session.scalars(select(RewardModel).where(RewardModel.state == "serving"))
        await reward_models.service.disable(session, policy, row, actor="key-1", reason="odd")
    taken = await reward_models.claim(harness.db, "me", settings)
    assert taken is not None and taken.id == under_way.id
    assert await reward_models.commit(harness.db, taken, **DONE) == "trained"
    await spoken(harness, 10, seed=1)
    await reward_models.reconcile(harness.db, settings)
    assert await states(harness) == [(1, "disabled"), (2, "trained")]
