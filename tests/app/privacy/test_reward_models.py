"""Whom a reward model learned from is erased: it is silent, marked, named, and another is fitted without them."""

from typing import Any

import pytest

from alignment.config.rewards import RewardsConfig
from app.core import leases
from app.models import RewardModel, RewardModelTurn
from app.training.reward_models.erasure import ERASED
from tests.support.deployment import Harness
from tests.support.human_feedback import learning, said, spoken
from workers.training import reward_models

DONE = {"path": "/nowhere/rm", "manifest_sha256": "1" * 64, "metrics": {"agreement": 0.9}}


async def erase(harness: Harness, name: str) -> dict[str, Any]:
    answer = await harness.api.delete(f"/v1/subjects/{name}")
    assert answer.status_code == 200, answer.text
    body: dict[str, Any] = answer.json()
    return body


async def listen(harness: Harness) -> None:
    config: RewardsConfig = learning(harness).rewards
    answer = await harness.api.put("/v1/policies/shop/rewards", json=config.model_dump(mode="json"))
    assert answer.status_code == 200, answer.text


async def claimed(harness: Harness) -> reward_models.Claimed:
    await listen(harness)
    await reward_models.reconcile(harness.db, harness.settings)
    row = await reward_models.claim(harness.db, "me", harness.settings)
    assert row is not None
    return row


async def test_the_one_that_serves_is_silent_and_another_is_fitted_without_them(harness: Harness) -> None:
    await spoken(harness, 45)
    theirs = await harness.turn(end_user="ada")
    await said(harness, theirs, 1.0, "bob")
    await reward_models.commit(harness.db, await claimed(harness), **DONE)
    lineage = (await harness.api.get(f"/v1/chat/completions/{theirs.id}/lineage")).json()
    assert lineage["reward_models"] == ["shop/rm-1"]
    body = await erase(harness, "ada")
    assert body["reward_models"] == ["shop/rm-1"]
    first, second = sorted(await harness.all(RewardModel), key=lambda row: row.number)
    assert (first.state, first.actor, first.reason) == ("disabled", "erasure", ERASED)
    assert first.tainted_at is not None and second.state == "open"
    again = await reward_models.claim(harness.db, "me", harness.settings)
    assert again is not None and len(again.words) == 45
    assert theirs.id not in {reply.turn_id for reply in again.words.replies}
    serve = await harness.api.post("/v1/policies/shop/reward-models/1/serve")
    assert serve.json()["error"]["code"] == "reward_model_erased"


async def test_one_who_spoke_of_others_replies_counts_too(harness: Harness) -> None:
    turns = await spoken(harness, 45)
    await said(harness, turns[0], -1.0, "eve")
    await reward_models.commit(harness.db, await claimed(harness), **DONE)
    assert (await erase(harness, "HUMAN/eve"))["reward_models"] == ["shop/rm-1"]


async def test_what_was_said_after_it_was_fitted_marks_nothing(harness: Harness) -> None:
    turns = await spoken(harness, 45)
    await reward_models.commit(harness.db, await claimed(harness), **DONE)
    await said(harness, turns[0], -1.0, "eve")
    assert (await erase(harness, "HUMAN/eve"))["reward_models"] == []
    [row] = await harness.all(RewardModel)
    assert (row.state, row.tainted_at) == ("serving", None)


async def test_a_trainer_that_holds_the_fit_cannot_commit_and_reads_again(harness: Harness) -> None:
    await spoken(harness, 45)
    theirs = await harness.turn(end_user="ada")
    await said(harness, theirs, 1.0, "bob")
    held = await claimed(harness)
    await erase(harness, "ada")
    with pytest.raises(leases.LeaseLost):
        await reward_models.commit(harness.db, held, **DONE)
    assert await harness.all(RewardModelTurn) == []
    again = await reward_models.claim(harness.db, "me", harness.settings)
    assert again is not None and again.id == held.id and again.attempt == 1
    assert len(again.words) == 45
    assert await reward_models.commit(harness.db, again, **DONE) == "serving"
