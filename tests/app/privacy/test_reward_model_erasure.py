"""Erasure and reward models: those that learned from the subject are disabled, tainted, reported and fitted anew."""

from pathlib import Path
from typing import Any

import pytest

from alignment.config.rewards import RewardsConfig
from app.core import leases
from app.models import RewardModel, RewardModelTurn
from app.training.unlearning import REWARD_MODEL_DATA_ERASED
from tests.support.deployment import Harness
from tests.support.human_feedback import add_rating, create_rated_turns, settings_with_reward_model
from workers.training import reward_model_fits
from workers.training.results import FittedRewardModel

FITTED = FittedRewardModel(Path("/nowhere/rm"), "1" * 64, {"agreement": 0.9})


async def erase(harness: Harness, name: str) -> dict[str, Any]:
    answer = await harness.api.delete(f"/v1/subjects/{name}")
    assert answer.status_code == 200, answer.text
    body: dict[str, Any] = answer.json()
    return body


async def use_reward_model(harness: Harness) -> None:
    config: RewardsConfig = settings_with_reward_model(harness).rewards
    answer = await harness.api.put("/v1/policies/shop/rewards", json=config.model_dump(mode="json"))
    assert answer.status_code == 200, answer.text


async def claim_fit(harness: Harness) -> reward_model_fits.ClaimedFit:
    await use_reward_model(harness)
    await reward_model_fits.reconcile(harness.db, harness.settings)
    row = await reward_model_fits.claim(harness.db, "me", harness.settings)
    assert row is not None
    return row


async def test_serving_model_is_disabled_and_another_is_fitted_without_the_subject(harness: Harness) -> None:
    await create_rated_turns(harness, 45)
    turn = await harness.turn(end_user="ada")
    await add_rating(harness, turn, 1.0, "bob")
    await reward_model_fits.commit(harness.db, await claim_fit(harness), FITTED)
    lineage = (await harness.api.get(f"/v1/chat/completions/{turn.id}/lineage")).json()
    assert lineage["reward_models"] == ["shop/rm-1"]
    body = await erase(harness, "ada")
    assert body["reward_models"] == ["shop/rm-1"]
    first, second = sorted(await harness.all(RewardModel), key=lambda row: row.number)
    assert (first.state, first.actor, first.reason) == ("disabled", "erasure", REWARD_MODEL_DATA_ERASED)
    assert first.tainted_at is not None and second.state == "open"
    second_fit = await reward_model_fits.claim(harness.db, "me", harness.settings)
    assert second_fit is not None and len(second_fit.dataset) == 45
    assert turn.id not in {reply.turn_id for reply in second_fit.dataset.replies}
    serve = await harness.api.post("/v1/policies/shop/reward-models/1/serve")
    assert serve.json()["error"]["code"] == "reward_model_tainted"


async def test_feedback_on_others_turns_taints_the_model(harness: Harness) -> None:
    turns = await create_rated_turns(harness, 45)
    await add_rating(harness, turns[0], -1.0, "eve")
    await reward_model_fits.commit(harness.db, await claim_fit(harness), FITTED)
    assert (await erase(harness, "HUMAN/eve"))["reward_models"] == ["shop/rm-1"]


async def test_feedback_after_the_fit_taints_nothing(harness: Harness) -> None:
    turns = await create_rated_turns(harness, 45)
    await reward_model_fits.commit(harness.db, await claim_fit(harness), FITTED)
    await add_rating(harness, turns[0], -1.0, "eve")
    assert (await erase(harness, "HUMAN/eve"))["reward_models"] == []
    [row] = await harness.all(RewardModel)
    assert (row.state, row.tainted_at) == ("serving", None)


async def test_trainer_that_claimed_the_fit_cannot_commit_and_reads_again(harness: Harness) -> None:
    await create_rated_turns(harness, 45)
    turn = await harness.turn(end_user="ada")
    await add_rating(harness, turn, 1.0, "bob")
    fit = await claim_fit(harness)
    await erase(harness, "ada")
    with pytest.raises(leases.LeaseLost):
        await reward_model_fits.commit(harness.db, fit, FITTED)
    assert await harness.all(RewardModelTurn) == []
    second_fit = await reward_model_fits.claim(harness.db, "me", harness.settings)
    assert second_fit is not None and second_fit.row.id == fit.row.id and second_fit.row.attempt == 1
    assert len(second_fit.dataset) == 45
    assert await reward_model_fits.commit(harness.db, second_fit, FITTED) == "serving"
