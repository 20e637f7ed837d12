"""Reward models as an admin sees and steers them."""

from typing import Any

import pytest

from app.models import Audit, Policy, RewardModelState
from tests.support.deployment import Harness
from tests.support.human_feedback import model

ROOT = "/v1/policies/shop/reward-models"
LISTENING = {"sources": [{"type": "explicit", "name": "explicit"}, {"type": "learned", "name": "learned"}]}


async def listen(harness: Harness) -> None:
    assert (await harness.api.put("/v1/policies/shop/rewards", json=LISTENING)).status_code == 200


async def listed(harness: Harness) -> dict[str, Any]:
    answer = await harness.api.get(ROOT)
    assert answer.status_code == 200, answer.text
    body: dict[str, Any] = answer.json()
    return body


async def test_a_fit_is_asked_for_and_not_twice(harness: Harness) -> None:
    assert await listed(harness) == {"object": "list", "policy": "shop", "serving": None, "people": None, "data": []}
    refused = await harness.api.post(ROOT)
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "no_learned_source")
    await listen(harness)
    asked = await harness.api.post(ROOT, json={"reason": "to see", "serve": False})
    assert asked.status_code == 202, asked.text
    row = asked.json()
    assert (row["name"], row["state"], row["reason"]) == ("shop/rm-1", "open", "to see")
    again = await harness.api.post(ROOT)
    assert (again.status_code, again.json()["error"]["code"]) == (409, "fit_under_way")
    assert [one["id"] for one in (await listed(harness))["data"]] == [row["id"]]
    [told] = [one for one in await harness.all(Audit) if one.action == "fit reward model"]
    assert (told.actor, told.subject, told.reason) == (harness.key[:16], "shop/rm-1", "to see")


async def test_one_is_let_serve_another_takes_its_place_and_is_silenced(harness: Harness) -> None:
    await listen(harness)
    await model(harness, RewardModelState.TRAINED)
    await model(harness, RewardModelState.TRAINED, metrics={"agreement": 0.8}, num_thumbs=40, num_pairs=2, num_raters=9)
    for number in (1, 2, 2):
        assert (await harness.api.post(f"{ROOT}/{number}/serve", json={"reason": "good"})).json()["state"] == "serving"
    body = await listed(harness)
    assert (body["serving"], [row["state"] for row in body["data"]]) == ("shop/rm-2", ["serving", "retired"])
    assert body["people"] == {"words": 0, "agreement": None, "at_most": None, "min_agreement": 0.6}
    assert (body["data"][0]["thumbs"], body["data"][0]["metrics"]) == (40, {"agreement": 0.8})
    for _ in range(2):
        disabled = (await harness.api.post(f"{ROOT}/2/disable", json={"reason": "odd"})).json()
        assert (disabled["state"], disabled["actor"], disabled["reason"]) == ("disabled", harness.key[:16], "odd")
    assert (await listed(harness))["serving"] is None
    assert (await harness.api.post(f"{ROOT}/1/serve")).json()["state"] == "serving", "back to one that served before"
    actions = [row.action for row in await harness.all(Audit) if row.subject.startswith("shop/rm-")]
    moved = ["reward model serving"] * 2 + ["reward model disabled", "reward model serving"]
    assert [action for action in actions if action != "fit reward model"] == moved


@pytest.mark.parametrize(
    ("state", "values", "verb", "code"),
    [
        (RewardModelState.OPEN, {}, "serve", "reward_model_state"),
        (RewardModelState.REFUSED, {}, "serve", "reward_model_state"),
        (RewardModelState.FAILED, {}, "serve", "reward_model_state"),
        (RewardModelState.DISABLED, {"tainted_at": 1.0}, "serve", "reward_model_erased"),
        (RewardModelState.RETIRED, {}, "disable", "reward_model_state"),
    ],
)
async def test_what_may_not_be_is_a_conflict(
    harness: Harness, state: RewardModelState, values: dict[str, Any], verb: str, code: str
) -> None:
    await model(harness, state, **values)
    answer = await harness.api.post(f"{ROOT}/1/{verb}")
    assert (answer.status_code, answer.json()["error"]["code"]) == (409, code)
    assert (await listed(harness))["data"][0]["state"] == state


async def test_what_is_not_there_is_not_found(harness: Harness) -> None:
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


async def test_the_status_says_which_serves(harness: Harness) -> None:
    await model(harness)
    body = (await harness.api.get("/v1/status")).json()
    told = {"serving": "shop/rm-1", "newest": "shop/rm-1", "state": "serving", "reason": None}
    assert body["reward_models"] == [told]
