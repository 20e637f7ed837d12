"""Reward models: fits are created, claimed and committed once; models that disagree with people are disabled."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select, update

from alignment.signals.ranking_accuracy import RankEvidence, RankStratum
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
from app.policies.locks import lock_policy
from app.training import human_labels, reward_models
from tests.support.deployment import Harness
from tests.support.human_feedback import add_rating, create_rated_turns, create_reward_model, settings_with_reward_model
from tests.support.shared_histories import follow_up
from workers.reconcile import reconcile
from workers.training import reward_model_fits
from workers.training.results import FittedRewardModel

METRICS = {"auc_low": 0.9}
FITTED = FittedRewardModel(Path("/nowhere/rm"), "1" * 64, METRICS)


async def list_states(harness: Harness) -> list[tuple[int, str]]:
    async with harness.db.read() as session:
        rows = await session.scalars(select(RewardModel).order_by(RewardModel.number, RewardModel.id))
        return [(row.number, row.state) for row in rows]


async def record_score(harness: Harness, turn: Turn, value: float, row: RewardModel) -> None:
    """Record the reward model's score of a turn."""
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


async def test_first_fit_is_created_once_when_there_is_enough_feedback(harness: Harness) -> None:
    settings = settings_with_reward_model(harness)
    await create_rated_turns(harness, 39)
    await reward_model_fits.reconcile(harness.db, settings)
    assert await list_states(harness) == []
    await create_rated_turns(harness, 1, seed=1)
    for _ in range(2):
        await reward_model_fits.reconcile(harness.db, settings)
    assert await list_states(harness) == [(1, "open")]
    async with harness.db.read() as session:
        [audit] = await session.scalars(select(Audit).where(Audit.action == "reward_model.fit_requested"))
    assert (audit.actor, audit.subject) == ("reconcile", "shop/rm-1")


async def test_policy_without_a_learned_source_gets_no_fit(harness: Harness) -> None:
    await create_rated_turns(harness, 50)
    await reward_model_fits.reconcile(harness.db, harness.settings)
    assert await list_states(harness) == []


async def test_feedback_of_programs_creates_no_fit(harness: Harness) -> None:
    await create_rated_turns(harness, 50)
    async with harness.db.write() as session:
        await session.execute(update(Feedback).values(source_kind="CODE"))
    await reward_model_fits.reconcile(harness.db, settings_with_reward_model(harness))
    assert await list_states(harness) == []


async def create_claimed_fit(harness: Harness, **source: Any) -> reward_model_fits.ClaimedFit:
    settings = settings_with_reward_model(harness, **source)
    await reward_model_fits.reconcile(harness.db, settings)
    row = await reward_model_fits.claim(harness.db, "me", settings)
    assert row is not None
    return row


async def test_dataset_has_human_labels_of_trainable_replies_only(harness: Harness) -> None:
    turns = await create_rated_turns(harness, 44)
    async with harness.db.write() as session:
        project = turns[0].project_id
        session.add(Rater(project_id=project, name="HUMAN/0-0", standing=RaterStanding.QUARANTINED))
        session.add(Rater(project_id=project, name="HUMAN/0-1", standing=RaterStanding.BLOCKED))
        (await session.get_one(Turn, turns[2].id)).exclusion_reason = "sampling was greedy"
        (await session.get_one(Turn, turns[3].id)).deleted_at = 1.0
        (await session.get_one(Turn, turns[4].id)).own_prompt_ids = None
        rows = {row.turn_id: row for row in await session.scalars(select(Reward))}
        rows[turns[5].id].rater = "CODE/linter"
        rows[turns[6].id].weight = 0.0
        rows[turns[7].id].source = "conversation/default/HUMAN/0-7"
        rows[turns[8].id].weight = 0.4
    dataset = (await create_claimed_fit(harness)).dataset
    labels = {dataset.replies[label.reply].turn_id: label for label in dataset.labels}
    assert set(labels) == {turn.id for turn in turns[8:]}
    assert labels[turns[8].id].weight == 0.4 and labels[turns[9].id].rater == "HUMAN/0-9"
    row = (await harness.all(RewardModel))[0]
    assert (row.num_thumbs, row.num_pairs, row.num_raters) == (36, 0, 36)
    assert {row.turn_id for row in await harness.all(RewardModelTurn)} == set(labels)


async def test_dataset_has_whole_prompts_of_turns_that_share_their_histories(harness: Harness) -> None:
    await create_rated_turns(harness, 40)
    turn = await harness.turn(**follow_up(await harness.turn()))
    await add_rating(harness, turn, 1.0, "ada")
    dataset = (await create_claimed_fit(harness)).dataset
    assert [reply.prompt_ids for reply in dataset.replies if reply.turn_id == turn.id] == [(1, 2, 3, 4, 5, 7, 8)]


async def test_rankings_become_pairs_of_replies_to_one_prompt(harness: Harness) -> None:
    await create_rated_turns(harness, 40)
    turns = [await harness.turn(own_prompt_ids=ids) for ids in ([1, 2], [1, 2], [1, 2], [1, 3])]
    ranking = {"source": "ranking/default/HUMAN/ada/t", "rater": "HUMAN/ada"}
    for turn, value in zip(turns, (1.0, 0.0, 0.0, -1.0), strict=True):
        await add_rating(harness, turn, value, "ada", **ranking)
    dataset = (await create_claimed_fit(harness)).dataset
    replies = dataset.replies
    weights = {(replies[pair.chosen].turn_id, replies[pair.rejected].turn_id): pair.weight for pair in dataset.pairs}
    assert weights == {
        (turns[0].id, turns[1].id): pytest.approx(2 / 3),
        (turns[0].id, turns[2].id): pytest.approx(2 / 3),
    }
    assert len(dataset.labels) == 40


async def test_fitted_model_serves_and_the_previous_one_is_retired(harness: Harness) -> None:
    await create_rated_turns(harness, 40)
    first = await create_claimed_fit(harness)
    assert await reward_model_fits.commit(harness.db, first, FITTED) == "serving"
    await create_rated_turns(harness, 10, seed=1)
    second = await create_claimed_fit(harness, refit_after=10)
    assert (await reward_model_fits.commit(harness.db, second, FITTED)) == "serving"
    assert await list_states(harness) == [(1, "retired"), (2, "serving")]
    row = await harness.get(RewardModel, second.row.id)
    assert (row.path, row.metrics, row.attempt) == ("/nowhere/rm", METRICS, 1) and row.served_at is not None
    assert row.lease_until is None


async def test_refused_fit_leaves_the_previous_model_serving(harness: Harness) -> None:
    serving = await create_reward_model(harness)
    await create_rated_turns(harness, 10)
    refused = await create_claimed_fit(harness, refit_after=10)
    await reward_model_fits.refuse(harness.db, refused, "it agrees in 40%", replace(FITTED, metrics={"agreement": 0.4}))
    assert await list_states(harness) == [(1, "serving"), (2, "refused")]
    assert (await harness.get(RewardModel, refused.row.id)).reason == "it agrees in 40%"
    assert (await harness.get(RewardModel, serving.id)).state == "serving"
    settings = settings_with_reward_model(harness, refit_after=10)
    await create_rated_turns(harness, 9, seed=1)
    await reward_model_fits.reconcile(harness.db, settings)
    assert len(await list_states(harness)) == 2, "it is not fitted again on the same labels"
    await create_rated_turns(harness, 1, seed=2)
    await reward_model_fits.reconcile(harness.db, settings)
    assert (await list_states(harness))[-1] == (3, "open")


async def test_one_trainer_claims_a_fit_and_a_late_one_cannot_commit(harness: Harness) -> None:
    await create_rated_turns(harness, 40)
    settings = settings_with_reward_model(harness)
    await reward_model_fits.reconcile(harness.db, settings)
    claims = await asyncio.gather(*(reward_model_fits.claim(harness.db, name, settings) for name in "ab"))
    [late] = [claim for claim in claims if claim is not None]
    async with harness.db.write() as session:  # as if the trainer was killed after its export and before its commit
        await session.execute(update(RewardModel).values(lease_until=0.0))
    again = await reward_model_fits.claim(harness.db, "c", settings)
    assert again is not None and again.row.id == late.row.id and (again.row.attempt, again.row.fence) == (2, 2)
    assert again.directory(settings) != late.directory(settings), "each attempt has a separate directory"
    with pytest.raises(leases.LeaseLost):
        await reward_model_fits.commit(harness.db, late, FITTED)
    with pytest.raises(leases.LeaseLost):
        await reward_model_fits.refuse(harness.db, late, "no")
    assert await list_states(harness) == [(1, "open")]
    assert await reward_model_fits.commit(harness.db, again, FITTED) == "serving"


async def test_fit_that_crashes_the_trainer_fails_with_the_last_reason(harness: Harness) -> None:
    await create_rated_turns(harness, 40)
    settings = settings_with_reward_model(harness)
    await reward_model_fits.reconcile(harness.db, settings)
    for _ in range(settings.workers.max_attempts):
        claimed = await reward_model_fits.claim(harness.db, "me", settings)
        assert claimed is not None
        await reward_model_fits.record_failed_attempt(harness.db, claimed, "MemoryError: no more")
        async with harness.db.write() as session:
            await session.execute(update(RewardModel).values(lease_until=0.0))
    assert await reward_model_fits.claim(harness.db, "me", settings) is None
    await reward_model_fits.reconcile(harness.db, settings)
    row = (await harness.all(RewardModel))[0]
    assert (row.state, row.actor) == ("failed", "reconcile")
    assert row.reason == "3 attempts ended without a result; the last one: MemoryError: no more"


async def test_model_that_disagrees_with_people_is_disabled_and_refitted(harness: Harness) -> None:
    row = await create_reward_model(harness)
    turns = await create_rated_turns(harness, 60)
    settings = settings_with_reward_model(harness, refit_after=1000)
    for number, turn in enumerate(turns):
        await record_score(harness, turn, -0.5 if number % 2 else 0.5, row)  # always the opposite of the label
    await reconcile(harness.db, settings)
    assert await list_states(harness) == [(1, "disabled"), (2, "open")]
    disabled = await harness.get(RewardModel, row.id)
    assert (
        disabled.reason.startswith("it agrees with people in 0% of their last 60 labels")
        and disabled.actor == "reconcile"
    )
    async with harness.db.read() as session:
        actions = set(await session.scalars(select(Audit.action)))
    assert {"reward_model.disabled", "reward_model.fit_requested"} <= actions


@pytest.mark.parametrize(("num_agreeing", "num_labels", "disables"), [(0, 28, False), (30, 60, True), (60, 60, False)])
async def test_a_model_at_chance_is_disabled_once_there_are_enough_labels(
    harness: Harness, num_agreeing: int, num_labels: int, disables: bool
) -> None:
    row = await create_reward_model(harness)
    for number, turn in enumerate(await create_rated_turns(harness, num_labels)):
        up = bool(number % 2)
        agrees = number < num_agreeing
        await record_score(harness, turn, 0.5 if up == agrees else -0.5, row)
    policy = await harness.policy()
    async with harness.db.read() as session:
        measured = await human_labels.measure_agreement(session, policy, row)
    rate = measured.agreement.rate
    assert measured.evidence.num_votes == num_labels and rate == pytest.approx(num_agreeing / num_labels)
    assert (human_labels.describe_disagreement(measured) is not None) == disables


async def test_only_new_feedback_on_scored_replies_counts(harness: Harness) -> None:
    row = await create_reward_model(harness)
    other = await create_reward_model(harness, RewardModelState.RETIRED)
    turns = await create_rated_turns(harness, 4)
    await record_score(harness, turns[0], 0.5, row)
    await record_score(harness, turns[1], 0.5, other)
    await record_score(harness, turns[2], 0.5, row)
    policy = await harness.policy()
    async with harness.db.write() as session:
        [old] = await session.scalars(select(Reward).where(Reward.turn_id == turns[2].id))
        old.created_at = 0.5
        (await session.get_one(RewardModel, row.id)).served_at = 1.0
    async with harness.db.read() as session:
        row = await session.get_one(RewardModel, row.id)
        agreement = (await human_labels.measure_agreement(session, policy, row)).agreement
    assert (agreement.total, agreement.downs) == (1, 1)


async def test_model_disabled_by_an_operator_stays_disabled(harness: Harness) -> None:
    settings = settings_with_reward_model(harness, refit_after=5)
    await create_reward_model(harness)
    await create_rated_turns(harness, 10)
    async with harness.db.write() as session:
        locked = await lock_policy(session, (await harness.policy()).id)
        open_fit = await reward_models.create_fit(locked, actor="reconcile", reason=None)
        [row] = await session.scalars(select(RewardModel).where(RewardModel.state == "serving"))
        await reward_models.disable(locked, row, actor="key-1", reason="odd")
    claimed = await reward_model_fits.claim(harness.db, "me", settings)
    assert claimed is not None and claimed.row.id == open_fit.id
    assert await reward_model_fits.commit(harness.db, claimed, FITTED) == "trained"
    await create_rated_turns(harness, 10, seed=1)
    await reward_model_fits.reconcile(harness.db, settings)
    assert await list_states(harness) == [(1, "disabled"), (2, "trained")]


async def test_a_refit_needs_a_quarter_more_feedback(harness: Harness) -> None:
    settings = settings_with_reward_model(harness, refit_after=10)
    await create_rated_turns(harness, 80)
    await reward_model_fits.reconcile(harness.db, settings)
    claimed = await reward_model_fits.claim(harness.db, "trainer", settings)
    assert claimed is not None
    await reward_model_fits.commit(harness.db, claimed, FITTED)
    await create_rated_turns(harness, 19, seed=1)
    await reward_model_fits.reconcile(harness.db, settings)
    assert await list_states(harness) == [(1, "serving")]
    await create_rated_turns(harness, 1, seed=2)
    await reward_model_fits.reconcile(harness.db, settings)
    assert await list_states(harness) == [(1, "serving"), (2, "open")]


async def test_scores_are_weighted_with_the_lower_bound_of_the_latest_evidence(harness: Harness) -> None:
    settings = settings_with_reward_model(harness, refit_after=1000)
    row = await create_reward_model(harness, metrics=METRICS)
    assert reward_models.score_weight(row) == pytest.approx(0.8)
    turns = await create_rated_turns(harness, 40)
    for number, turn in enumerate(turns):
        is_right = number >= 12  # 6 of the 20 approved replies and 6 of the others have a wrong score
        await record_score(harness, turn, 0.5 if (number % 2 == 1) == is_right else -0.5, row)
    await reward_model_fits.reconcile(harness.db, settings)
    [row] = await harness.all(RewardModel)
    low = RankEvidence((RankStratum(20, 20, 0.7),)).bounds().low
    assert row.state == "serving" and row.metrics == METRICS | {"serving_auc_low": pytest.approx(low, abs=0.01)}
    assert reward_models.score_weight(row) == pytest.approx(2 * low - 1, abs=0.02)


async def test_the_model_of_the_fit_before_predicts_the_votes_that_came_since(harness: Harness) -> None:
    """Also if that fit was refused; not if its files or some of its data are gone."""
    settings = settings_with_reward_model(harness)
    first = await create_rated_turns(harness, 40)
    await reward_model_fits.reconcile(harness.db, settings)
    claimed = await reward_model_fits.claim(harness.db, "me", settings)
    assert claimed is not None and claimed.previous is None
    await reward_model_fits.refuse(harness.db, claimed, "no order", FITTED)
    later = await create_rated_turns(harness, 20, seed=1)
    async with harness.db.write() as session:
        locked = await lock_policy(session, (await harness.policy()).id)
        await reward_models.create_fit(locked, actor="test", reason=None)
    claimed = await reward_model_fits.claim(harness.db, "me", settings)
    assert claimed is not None and claimed.previous is not None
    assert claimed.previous.seen == {turn.id for turn in first}
    unseen = {claimed.dataset.replies[index].turn_id for index in claimed.previous.unseen(claimed.dataset)}
    assert unseen == {turn.id for turn in later}
    async with harness.db.write() as session:
        [row] = await session.scalars(select(RewardModel).where(RewardModel.number == 1))
        row.tainted_at = 1.0
        await session.execute(update(RewardModel).values(lease_until=0.0))
    claimed = await reward_model_fits.claim(harness.db, "me", settings)
    assert claimed is not None and claimed.previous is None
