"""The reward models API: list, fit, serve and disable."""

from typing import Any

import pytest

from app.models import Audit, Policy, RewardModelState
from tests.support.deployment import Harness
from tests.support.human_feedback import create_reward_model

ROOT = "/v1/policies/shop/reward-models"
LEARNED_REWARDS = {"sources": [{"type": "explicit", "name": "explicit"}, {"type": "learned", "name": "learned"}]}


async def use_reward_model(harness: Harness) -> None:
    assert (await harness.api.put("/v1/policies/shop/rewards", json=LEARNED_REWARDS)).status_code == 200


async def list_models(harness: Harness) -> dict[str, Any]:
    answer = await harness.api.get(ROOT)
    assert answer.status_code == 200, answer.text
    body: dict[str, Any] = answer.json()
    return body


async def test_fit_is_requested_once(harness: Harness) -> None:
    assert await list_models(harness) == {
        "object": "list",
        "policy": "shop",
        "serving": None,
        "human_agreement": None,
        "data": [],
    }
    refused = await harness.api.post(ROOT)
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "no_learned_source")
    await use_reward_model(harness)
    response = await harness.api.post(ROOT, json={"reason": "to see", "serve": False})
    assert response.status_code == 202, response.text
    fit = response.json()
    assert (fit["name"], fit["state"], fit["reason"]) == ("shop/rm-1", "open", "to see")
    again = await harness.api.post(ROOT)
    assert (again.status_code, again.json()["error"]["code"]) == (409, "fit_under_way")
    assert [row["id"] for row in (await list_models(harness))["data"]] == [fit["id"]]
    [entry] = [row for row in await harness.all(Audit) if row.action == "reward_model.fit_requested"]
    assert (entry.actor, entry.subject, entry.reason) == (harness.key[:16], "shop/rm-1", "to see")


async def test_serve_retires_the_previous_model_and_disable_stops_it(harness: Harness) -> None:
    await use_reward_model(harness)
    await create_reward_model(harness, RewardModelState.TRAINED)
    await create_reward_model(
        harness, RewardModelState.TRAINED, metrics={"agreement": 0.8}, num_thumbs=40, num_pairs=2, num_raters=9
    )
    for number in (1, 2, 2):
        assert (await harness.api.post(f"{ROOT}/{number}/serve", json={"reason": "good"})).json()["state"] == "serving"
    body = await list_models(harness)
    assert (body["serving"], [row["state"] for row in body["data"]]) == ("shop/rm-2", ["serving", "retired"])
    assert body["human_agreement"] == {
        "labels": 0,
        "agreement": None,
        "auc": None,
        "auc_low": 0.0,
        "min_agreement": 0.6,
    }
    assert (body["data"][0]["binary_labels"], body["data"][0]["metrics"]) == (40, {"agreement": 0.8})
    for _ in range(2):
        disabled = (await harness.api.post(f"{ROOT}/2/disable", json={"reason": "odd"})).json()
        assert (disabled["state"], disabled["actor"], disabled["reason"]) == ("disabled", harness.key[:16], "odd")
    assert (await list_models(harness))["serving"] is None
    assert (await harness.api.post(f"{ROOT}/1/serve")).json()["state"] == "serving", "a model that served before"
    actions = [row.action for row in await harness.all(Audit) if row.subject.startswith("shop/rm-")]
    transitions = ["reward_model.serving"] * 2 + ["reward_model.disabled", "reward_model.serving"]
    assert [action for action in actions if action != "reward_model.fit_requested"] == transitions


@pytest.mark.parametrize(
    ("state", "values", "verb", "code"),
    [
        (RewardModelState.OPEN, {}, "serve", "reward_model_state"),
        (RewardModelState.REFUSED, {}, "serve", "reward_model_state"),
        (RewardModelState.FAILED, {}, "serve", "reward_model_state"),
        (RewardModelState.DISABLED, {"tainted_at": 1.0}, "serve", "reward_model_tainted"),
        (RewardModelState.RETIRED, {}, "disable", "reward_model_state"),
    ],
)
async def test_invalid_transition_is_a_conflict(
    harness: Harness, state: RewardModelState, values: dict[str, Any], verb: str, code: str
) -> None:
    await create_reward_model(harness, state, **values)
    answer = await harness.api.post(f"{ROOT}/1/{verb}")
    assert (answer.status_code, answer.json()["error"]["code"]) == (409, code)
    assert (await list_models(harness))["data"][0]["state"] == state


async def test_unknown_model_is_not_found(harness: Harness) -> None:
    assert (await harness.api.post(f"{ROOT}/1/serve")).status_code == 404
    assert (await harness.api.post(f"{ROOT}/0/serve")).status_code in (400, 404, 422)
    assert (await harness.api.get("/v1/policies/nobody/reward-models")).status_code == 404
    assert (await harness.api.post(ROOT, json={"server": True})).status_code == 400


async def test_a_learned_source_alone_is_refused_with_one_sentence(harness: Harness) -> None:
    answer = await harness.api.put(
        "/v1/policies/shop/rewards", json={"sources": [{"type": "learned", "name": "learned"}]}
    )
    assert answer.status_code == 400 and "cannot be the only one" in answer.json()["error"]["message"]
    async with harness.db.read() as session:
        assert (await session.get_one(Policy, (await harness.policy()).id)).rewards is None


async def test_status_names_the_serving_model(harness: Harness) -> None:
    await create_reward_model(harness)
    body = (await harness.api.get("/v1/status")).json()
    expected = {"serving": "shop/rm-1", "newest": "shop/rm-1", "state": "serving", "reason": None}
    assert body["reward_models"] == [expected]
