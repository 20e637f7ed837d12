"""The rollouts API: settings, statistics and plans."""

from typing import Any

import pytest

from alignment.config.rollouts import RolloutsConfig
from app.models import Audit, Dataset, Rollout
from tests.support.deployment import Harness
from tests.support.rollout_rows import chat, create_plan, create_prompt_set, run_rollouts, with_group_sampling
from tests.support.scripted_engine import ScriptedEngine

ROOT = "/v1/policies/shop/rollouts"
SUMS = (("2 + 2?", "4"), ("3 + 4?", "7"))


async def test_settings_are_shown_set_and_reset(harness: Harness) -> None:
    body = (await harness.api.get(ROOT)).json()
    assert (body["overridden"], body["rollouts"], body["disabled_reason"]) == (
        False,
        RolloutsConfig().model_dump(mode="json"),
        "extra_replies is 0",
    )
    override = {"group_sampling": {"extra_replies": 3, "tokens_per_hour": 1000}, "in_flight": 1}
    body = (await harness.api.put(ROOT, json=override)).json()
    assert (
        body["overridden"]
        and body["rollouts"]["group_sampling"]["extra_replies"] == 3
        and body["rollouts"]["in_flight"] == 1
    )
    assert body["disabled_reason"] == "no reward source of the policy can score a reply that no user has seen"
    assert (await harness.api.get(ROOT)).json() == body
    assert (await harness.api.delete(ROOT)).json()["overridden"] is False
    assert (await harness.policy()).rollouts is None
    [updated, reset] = [row for row in await harness.all(Audit) if "rollouts" in row.action]
    assert (updated.action, updated.details["extra_replies"], reset.action) == (
        "rollouts.updated",
        3,
        "rollouts.reset",
    )


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"group_sampling": {"extra_replies": 16}}, "group_sampling.extra_replies"),
        ({"group_sampling": {"extra_replies": "3"}}, "group_sampling.extra_replies"),
        ({"shadow": {}}, "shadow"),
        ({"max_plan_share": 0}, "max_plan_share"),
        ({"in_flight": 3}, "in_flight"),
        ({"max_open_chats": 1}, "max_open_chats"),
        ({"group_sampling": {"tokens_per_hour": 100_001}}, "group_sampling.tokens_per_hour"),
        ({"verifiers": {"mine": "os:system"}}, "verifiers"),
    ],
)
@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
async def test_invalid_settings_are_refused(harness: Harness, body: dict[str, Any], param: str) -> None:
    answer = await harness.api.put(ROOT, json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert (await harness.policy()).rollouts is None


async def test_cost_is_shown(harness: Harness, scripted: ScriptedEngine) -> None:
    await chat(harness)
    rows = await run_rollouts(harness, with_group_sampling(harness, "http://127.0.0.1:9", extra_replies=2))
    tokens = sum(row.tokens for row in rows)
    body = (await harness.api.get(ROOT)).json()
    assert (
        body["group_sampling"]["done"] == 2
        and body["group_sampling"]["tokens"] == body["tokens_last_hour"] == tokens > 0
    )
    assert body["prompt_sets"]["done"] == 0


@pytest.mark.parametrize(
    ("change", "status", "param"),
    [
        ({"dataset": "nothing"}, 404, "dataset"),
        ({"n": 1}, 400, "n"),
        ({"passes": 0}, 400, "passes"),
        ({"temperature": 0}, 400, "temperature"),
        ({"max_tokens": 100_000}, 400, "max_tokens"),
        ({"verifier": {"type": "custom", "name": "mine"}}, 400, "verifier.name"),
        ({"verifier": {"type": "custom", "name": "os:system"}}, 400, "verifier.name"),
        ({"verifier": {"type": "regex", "pattern": "("}}, 400, "verifier.pattern"),
        ({"verifier": {"type": "nobody"}}, 400, "verifier.type"),
    ],
)
@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
async def test_invalid_plans_are_refused(harness: Harness, change: dict[str, Any], status: int, param: str) -> None:
    await create_prompt_set(harness, *SUMS)
    body = {"dataset": "sums", "verifier": {"type": "number"}, **change}
    answer = await harness.api.post(f"{ROOT}/plans", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, param), answer.text


async def test_verifier_that_needs_a_reference_refuses_a_set_without(harness: Harness) -> None:
    await create_prompt_set(harness, ("2 + 2?", None))
    for verifier, status in (
        ({"type": "number"}, 400),
        ({"type": "regex"}, 400),
        ({"type": "regex", "pattern": "4"}, 201),
    ):
        answer = await harness.api.post(f"{ROOT}/plans", json={"dataset": "sums", "verifier": verifier})
        assert answer.status_code == status, answer.text


async def test_id_of_a_dataset_comes_before_the_name_of_another(harness: Harness) -> None:
    one, other = [await create_prompt_set(harness, *SUMS, name=name) for name in ("one", "other")]
    async with harness.db.write() as session:
        for dataset, name in ((one, other.id), (other, one.id)):
            (await session.get_one(Dataset, dataset.id)).name = name
    for dataset in (one, other):
        assert (await create_plan(harness, dataset=dataset.id))["dataset_id"] == dataset.id


async def test_plans_belong_to_their_policy(harness: Harness) -> None:
    await create_prompt_set(harness, *SUMS)
    plan_ids = [(await create_plan(harness, n=n))["id"] for n in (2, 3, 4)]
    page = (await harness.api.get(f"{ROOT}/plans", params={"limit": 2})).json()
    assert [plan["id"] for plan in page["data"]] == plan_ids[:0:-1] and page["has_more"]
    rest = (await harness.api.get(f"{ROOT}/plans", params={"limit": 2, "after": page["last_id"]})).json()
    assert [plan["n"] for plan in rest["data"]] == [2] and not rest["has_more"]
    assert (await harness.api.get(f"{ROOT}/plans/{plan_ids[0]}")).json()["verifier"]["type"] == "number"
    for path in (f"{ROOT}/plans/plan-nothing", f"/v1/policies/other/rollouts/plans/{plan_ids[0]}"):
        assert (await harness.api.get(path)).status_code == 404
    assert await harness.all(Rollout) == [], "creating a plan samples no reply yet"


@pytest.mark.parametrize("scopes", [["chat"], ["feedback"]])
async def test_rollouts_need_an_admin_key(harness: Harness, scopes: list[str]) -> None:
    key = (await harness.api.post("/v1/keys", json={"name": "other", "scopes": scopes})).json()["key"]
    for method, path in (("GET", ROOT), ("PUT", ROOT), ("POST", f"{ROOT}/plans"), ("GET", f"{ROOT}/plans")):
        answer = await harness.api.request(method, path, json={}, headers={"authorization": f"Bearer {key}"})
        assert answer.status_code == 403
