"""Planned runs over the API: create or join one, see how far it is."""

from typing import Any

import pytest

from app.models import PlannedRun
from tests.support.deployment import Harness
from tests.support.planned_runs import RUNS, act, claim, finish, join, post, read, start


async def test_same_plan_joins_the_run(harness: Harness) -> None:
    plan: dict[str, Any] = {"num_tasks": 2, "group_size": 3, "seed": 7, "metadata": {"environment": "rooms"}}
    created, joined = await join(harness, **plan), await join(harness, **plan)
    assert (created.status_code, joined.status_code) == (201, 200)
    assert created.json() == joined.json() == await read(harness)
    view = created.json()
    assert view["attempts"] == {"waiting": 6, "under_way": 0, "done": 0, "lost": 0, "cancelled": 0}
    assert (view["is_complete"], view["mean_outcome"], view["ends"]) == (False, None, {})
    assert view["lease_seconds"] == harness.settings.workers.lease_seconds
    assert len(await harness.all(PlannedRun)) == 1


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"seed": 8}, "seed"),
        ({"split": "test"}, "split"),
        ({"group_size": 3}, "group_size"),
        ({"version": "pin"}, "version"),
        ({"policy": "other"}, "policy"),
        ({"limits": {"max_turns": 4}}, "limits.max_turns"),
        ({"metadata": {"environment": "rooms", "arguments": "1"}}, "metadata.arguments"),
        ({"description_sha256": "2" * 64}, "description_sha256"),
        ({"num_tasks": 1}, "num_tasks"),
    ],
)
async def test_other_plan_is_refused_and_the_field_named(harness: Harness, change: dict[str, Any], field: str) -> None:
    await harness.api.post("/v1/policies", json={"name": "other"})
    plan = {"num_tasks": 2, "metadata": {"environment": "rooms"}, "description_sha256": "1" * 64}
    await join(harness, **plan)
    refused = await join(harness, **plan | change)
    error = refused.json()["error"]
    assert (refused.status_code, error["code"], error["param"]) == (409, "run_plan_differs", field)
    assert "'monday'" in error["message"]


async def test_run_may_get_more_tasks_and_an_unknown_description_is_not_compared(harness: Harness) -> None:
    await join(harness, description_sha256="1" * 64)
    joined = await join(harness, num_tasks=5)
    assert (joined.status_code, joined.json()["num_tasks"]) == (200, 5)
    assert (await join(harness, num_tasks=5, description_sha256="1" * 64)).status_code == 200


@pytest.mark.parametrize(
    ("field", "value"),
    [("name", "a/b"), ("name", ""), ("num_tasks", 0), ("group_size", 129), ("seed", 1.5), ("policies", 1)],
)
async def test_impossible_plans_are_refused(harness: Harness, field: str, value: Any) -> None:
    answer = await join(harness, **{field: value})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == field
    assert await harness.all(PlannedRun) == []


async def test_unknown_policy_and_unknown_run(harness: Harness) -> None:
    unknown = await join(harness, policy="nobody")
    assert (unknown.status_code, unknown.json()["error"]["param"]) == (404, "policy")
    answers = [await harness.api.get(f"{RUNS}/monday"), await post(harness, "claim", owner="one")]
    assert [answer.status_code for answer in answers] == [404, 404]


async def test_view_counts_attempts_and_means_outcomes(harness: Harness) -> None:
    await join(harness, num_tasks=3, group_size=2)
    for report in ({"outcome": 1.0}, {"outcome": 0.0, "reason": "max_turns"}, {"reason": "completed"}):
        attempt = await claim(harness)
        await start(harness, attempt)
        done = await finish(harness, attempt, **report)
        assert (done["state"], done["episode"]["outcome"]) == ("done", report.get("outcome"))
    await claim(harness)
    view = await read(harness)
    assert view["attempts"] == {"waiting": 2, "under_way": 1, "done": 3, "lost": 0, "cancelled": 0}
    assert view["ends"] == {"completed": 2, "max_turns": 1} and view["mean_outcome"] == 0.5


async def test_runs_are_listed_in_pages(harness: Harness) -> None:
    names = [f"run-{number}" for number in range(3)]
    for name in names:
        await join(harness, name=name)
    first = (await harness.api.get(RUNS, params={"limit": 2})).json()
    second = (await harness.api.get(RUNS, params={"limit": 2, "after": first["last_id"]})).json()
    assert [row["name"] for row in (*first["data"], *second["data"])] == names
    assert (first["has_more"], second["has_more"]) == (True, False)
    newest = (await harness.api.get(RUNS, params={"limit": 1, "order": "desc"})).json()["data"]
    assert [row["name"] for row in newest] == ["run-2"]
    assert (await harness.api.get(RUNS, params={"after": "nobody"})).status_code == 404


async def test_key_of_an_episode_plays_no_runs(harness: Harness) -> None:
    await join(harness)
    attempt = await claim(harness)
    episode = await start(harness, attempt)
    headers = {"authorization": f"Bearer {episode['api_key']}"}
    answer = await harness.api.post(f"{RUNS}/monday/claim", json={"owner": "two"}, headers=headers)
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "episode_key")
    assert (await act(harness, attempt, "release")).status_code == 200
