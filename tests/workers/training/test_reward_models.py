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
    Reward,
    RewardModel,
    RewardModelState,
    RewardModelTurn,
    Standing,
    Turn,
    new_id,
)
from app.training.reward_models import agreement
from tests.support.deployment import Ring
from tests.support.human_feedback import learning, model, said, spoken
from workers.reconcile import sweep
from workers.training import reward_models

METRICS = {"agreement": 0.9}
DONE = {"path": "/nowhere/rm", "manifest_sha256": "1" * 64, "metrics": METRICS}


async def states(ring: Ring) -> list[tuple[int, str]]:
    async with ring.db.read() as session:
        rows = await session.scalars(select(RewardModel).order_by(RewardModel.number))
        return [(row.number, row.state) for row in rows]


async def judged(ring: Ring, turn: Turn, value: float, row: RewardModel) -> None:
    """What the model said of it."""
    async with ring.db.write() as session:
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


async def test_a_first_fit_is_opened_when_enough_is_said_and_once(ring: Ring) -> None:
    settings = learning(ring)
    await spoken(ring, 39)
    await reward_models.sweep(ring.db, settings)
    assert await states(ring) == []
    await spoken(ring, 1, seed=1)
    for _ in range(2):
        await reward_models.sweep(ring.db, settings)
    assert await states(ring) == [(1, "open")]
    async with ring.db.read() as session:
        [told] = await session.scalars(select(Audit).where(Audit.action == "fit reward model"))
    assert (told.actor, told.subject) == ("sweep", "shop/rm-1")


async def test_a_policy_that_does_not_listen_to_one_gets_none(ring: Ring) -> None:
    await spoken(ring, 50)
    await reward_models.sweep(ring.db, ring.settings)
    assert await states(ring) == []


async def test_what_machines_say_opens_nothing(ring: Ring) -> None:
    await spoken(ring, 50)
    async with ring.db.write() as session:
        await session.execute(update(Feedback).values(source_kind="CODE"))
    await reward_models.sweep(ring.db, learning(ring))
    assert await states(ring) == []


async def claimed(ring: Ring, **source: Any) -> reward_models.Claimed:
    settings = learning(ring, **source)
    await reward_models.sweep(ring.db, settings)
    row = await reward_models.claim(ring.db, "me", settings)
    assert row is not None
    return row


async def test_what_is_learned_from_is_people_s_words_about_replies_that_may_be(ring: Ring) -> None:
    turns = await spoken(ring, 44)
    async with ring.db.write() as session:
        project = turns[0].project_id
        session.add(Rater(project_id=project, name="HUMAN/0-0", standing=Standing.HELD))
        session.add(Rater(project_id=project, name="HUMAN/0-1", standing=Standing.BLOCKED))
        (await session.get_one(Turn, turns[2].id)).flaw = "sampling was greedy"
        (await session.get_one(Turn, turns[3].id)).deleted_at = 1.0
        (await session.get_one(Turn, turns[4].id)).prompt_ids = None
        rows = {row.turn_id: row for row in await session.scalars(select(Reward))}
        rows[turns[5].id].rater = "CODE/linter"
        rows[turns[6].id].weight = 0.0
        rows[turns[7].id].source = "conversation/default/HUMAN/0-7"
        rows[turns[8].id].weight = 0.4
    words = (await claimed(ring)).words
    known = {words.replies[thumb.reply].turn_id: thumb for thumb in words.thumbs}
    assert set(known) == {turn.id for turn in turns[8:]}
    assert known[turns[8].id].weight == 0.4 and known[turns[9].id].rater == "HUMAN/0-9"
    row = (await ring.all(RewardModel))[0]
    assert (row.num_thumbs, row.num_pairs, row.num_raters) == (36, 0, 36)
    assert {one.turn_id for one in await ring.all(RewardModelTurn)} == set(known)


async def test_orders_become_pairs_of_replies_to_one_prompt(ring: Ring) -> None:
    await spoken(ring, 40)
    same, other = {"prompt_ids": [1, 2]}, {"prompt_ids": [1, 3]}
    turns = [await ring.turn(**same), await ring.turn(**same), await ring.turn(**same), await ring.turn(**other)]
    order = {"source": "ranking/default/HUMAN/ada/t", "rater": "HUMAN/ada"}
    for turn, value in zip(turns, (1.0, 0.0, 0.0, -1.0), strict=True):
        await said(ring, turn, value, "ada", **order)
    words = (await claimed(ring)).words
    told = {(words.replies[p.chosen].turn_id, words.replies[p.rejected].turn_id): p.weight for p in words.pairs}
    assert told == {(turns[0].id, turns[1].id): pytest.approx(2 / 3), (turns[0].id, turns[2].id): pytest.approx(2 / 3)}
    assert len(words.thumbs) == 40


async def test_the_fitted_one_serves_and_the_one_before_is_retired(ring: Ring) -> None:
    await spoken(ring, 40)
    first = await claimed(ring)
    assert await reward_models.commit(ring.db, first, **DONE) == "serving"
    await spoken(ring, 10, seed=1)
    second = await claimed(ring, refit_after=10)
    assert (await reward_models.commit(ring.db, second, **DONE)) == "serving"
    assert await states(ring) == [(1, "retired"), (2, "serving")]
    row = await ring.get(RewardModel, second.id)
    assert (row.path, row.metrics, row.attempt) == ("/nowhere/rm", METRICS, 1) and row.served_at is not None
    assert row.lease_until is None


async def test_one_that_is_not_good_enough_is_refused_and_the_one_before_goes_on(ring: Ring) -> None:
    before = await model(ring)
    await spoken(ring, 10)
    tried = await claimed(ring, refit_after=10)
    await reward_models.refuse(ring.db, tried, "it agrees in 40%", {"agreement": 0.4})
    assert await states(ring) == [(1, "serving"), (2, "refused")]
    assert (await ring.get(RewardModel, tried.id)).reason == "it agrees in 40%"
    assert (await ring.get(RewardModel, before.id)).state == "serving"
    settings = learning(ring, refit_after=10)
    await spoken(ring, 9, seed=1)
    await reward_models.sweep(ring.db, settings)
    assert len(await states(ring)) == 2, "it is not tried again on the same words"
    await spoken(ring, 1, seed=2)
    await reward_models.sweep(ring.db, settings)
    assert (await states(ring))[-1] == (3, "open")


async def test_of_two_trainers_one_has_the_fit_and_a_late_one_cannot_commit(ring: Ring) -> None:
    await spoken(ring, 40)
    settings = learning(ring)
    await reward_models.sweep(ring.db, settings)
    both = await asyncio.gather(*(reward_models.claim(ring.db, name, settings) for name in "ab"))
    [late] = [one for one in both if one is not None]
    async with ring.db.write() as session:  # it was killed after its export, before its commit
        await session.execute(update(RewardModel).values(lease_until=0.0))
    again = await reward_models.claim(ring.db, "c", settings)
    assert again is not None and again.id == late.id and (again.attempt, again.fence) == (2, 2)
    assert again.directory(settings) != late.directory(settings), "what the dead one wrote is not in the way"
    with pytest.raises(leases.LeaseLost):
        await reward_models.commit(ring.db, late, **DONE)
    with pytest.raises(leases.LeaseLost):
        await reward_models.refuse(ring.db, late, "no", {})
    assert await states(ring) == [(1, "open")]
    assert await reward_models.commit(ring.db, again, **DONE) == "serving"


async def test_one_that_takes_the_trainer_down_again_and_again_is_failed_with_the_last_reason(ring: Ring) -> None:
    await spoken(ring, 40)
    settings = learning(ring)
    await reward_models.sweep(ring.db, settings)
    for _ in range(settings.max_attempts):
        taken = await reward_models.claim(ring.db, "me", settings)
        assert taken is not None
        await reward_models.note_failure(ring.db, taken, "MemoryError: no more")
        async with ring.db.write() as session:
            await session.execute(update(RewardModel).values(lease_until=0.0))
    assert await reward_models.claim(ring.db, "me", settings) is None
    await reward_models.sweep(ring.db, settings)
    row = (await ring.all(RewardModel))[0]
    assert (row.state, row.actor) == ("failed", "sweep")
    assert row.reason == "3 attempts ended without a result; the last one: MemoryError: no more"


async def test_whom_people_contradict_is_silenced_and_fitted_anew(ring: Ring) -> None:
    row = await model(ring)
    turns = await spoken(ring, 60)
    settings = learning(ring, refit_after=1000)
    for number, turn in enumerate(turns):
        await judged(ring, turn, -0.5 if number % 2 else 0.5, row)  # always the contrary
    await sweep(ring.db, settings)
    assert await states(ring) == [(1, "silenced"), (2, "open")]
    silenced = await ring.get(RewardModel, row.id)
    assert (
        silenced.reason.startswith("it agrees with people in 0% of their last 60 words") and silenced.actor == "sweep"
    )
    async with ring.db.read() as session:
        actions = set(await session.scalars(select(Audit.action)))
    assert {"reward model silenced", "fit reward model"} <= actions


@pytest.mark.parametrize(("right", "words"), [(0, 28), (24, 60), (60, 60)])
async def test_few_words_and_chance_silence_nobody(ring: Ring, right: int, words: int) -> None:
    row = await model(ring)
    for number, turn in enumerate(await spoken(ring, words)):
        up = bool(number % 2)
        agrees = number < right
        await judged(ring, turn, 0.5 if up == agrees else -0.5, row)
    policy = await ring.policy()
    async with ring.db.read() as session:
        counted = await agreement.measured(session, policy, row)
    assert counted.words == words and counted.share == pytest.approx(right / words)
    assert agreement.contrary(counted, 0.6) is None


async def test_only_what_was_said_since_and_of_what_it_judged_itself_counts(ring: Ring) -> None:
    row = await model(ring)
    other = await model(ring, RewardModelState.RETIRED)
    turns = await spoken(ring, 4)
    await judged(ring, turns[0], 0.5, row)
    await judged(ring, turns[1], 0.5, other)
    await judged(ring, turns[2], 0.5, row)
    policy = await ring.policy()
    async with ring.db.write() as session:
        [old] = await session.scalars(select(Reward).where(Reward.turn_id == turns[2].id))
        old.created_at = 0.5
        (await session.get_one(RewardModel, row.id)).served_at = 1.0
    async with ring.db.read() as session:
        row = await session.get_one(RewardModel, row.id)
        counted = await agreement.measured(session, policy, row)
    assert (counted.words, counted.downs) == (1, 1)


async def test_an_operator_s_word_holds_until_an_operator_takes_it_back(ring: Ring) -> None:
    settings = learning(ring, refit_after=5)
    await model(ring)
    await spoken(ring, 10)
    async with ring.db.write() as session:
        policy = await session.merge(await ring.policy())
        under_way = await reward_models.service.open_fit(session, policy, actor="sweep", reason=None)
        [row] = await session.scalars(select(RewardModel).where(RewardModel.state == "serving"))
        await reward_models.service.silence(session, policy, row, actor="key-1", reason="odd")
    taken = await reward_models.claim(ring.db, "me", settings)
    assert taken is not None and taken.id == under_way.id
    assert await reward_models.commit(ring.db, taken, **DONE) == "trained"
    await spoken(ring, 10, seed=1)
    await reward_models.sweep(ring.db, settings)
    assert await states(ring) == [(1, "silenced"), (2, "trained")]
