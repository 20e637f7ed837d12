"""Limits of a project: refused with the limit's name, lowered by its admins, and raised by the operator only."""

from typing import Any

import httpx2
import pytest

from app.core.project_limits import DeploymentLimits, ProjectLimits
from app.models import Audit
from app.projects import service
from tests.app.projects.test_endpoints import bearer, create_key
from tests.support.deployment import Harness
from tests.support.parquet_files import import_file, to_parquet
from tests.support.scripted_engine import ScriptedEngine

CHAT = {"model": "shop", "messages": [{"role": "user", "content": "Open?"}]}


async def set_limits(harness: Harness, **limits: Any) -> httpx2.Response:
    return await harness.api.patch("/v1/project", json={"limits": limits})


def error_of(response: httpx2.Response) -> tuple[int, str]:
    return response.status_code, response.json()["error"]["code"]


@pytest.fixture(autouse=True)
def long_minutes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a minute last for centuries, so that none ends between two requests."""
    monkeypatch.setattr("app.core.rate_limits.MINUTE", 1e10)


async def test_an_admin_can_only_lower_limits(harness: Harness) -> None:
    default = DeploymentLimits().pins
    assert (await harness.api.get("/v1/project")).json()["limits"]["pins"] == default
    assert (await set_limits(harness, pins=5)).json()["limits"]["pins"] == 5
    for pins in (6, None, -1, "5"):
        answer = await set_limits(harness, pins=pins)
        assert (error_of(answer), answer.json()["error"]["param"]) == ((400, "invalid_value"), "limits.pins")
    assert (await harness.api.patch("/v1/project", json={})).status_code == 400
    assert [row.details for row in await harness.all(Audit) if row.action == "project.limits_changed"] == [{"pins": 5}]
    project_id = (await harness.policy()).project_id
    async with harness.db.write() as session:
        await service.set_limits(session, project_id, ProjectLimits(pins=10**9), actor="operator")
    assert (await harness.api.get("/v1/project")).json()["limits"]["pins"] == default


async def test_requests_of_all_keys_count_together(harness: Harness) -> None:
    other = (await create_key(harness))["key"]
    assert (await set_limits(harness, requests_per_minute=2)).status_code == 200
    answers = [await harness.api.get("/v1/models", headers=bearer(key)) for key in (harness.key, other, other)]
    assert [answer.status_code for answer in answers] == [200, 200, 429]
    assert error_of(answers[-1]) == (429, "project_limit") and "requests_per_minute" in answers[-1].text
    assert int(answers[-1].headers["retry-after"]) >= 1


async def test_a_batch_counts_with_all_its_items(harness: Harness) -> None:
    turn = await harness.turn()
    assert (await set_limits(harness, feedback_per_minute=5)).status_code == 200
    item = {"completion_id": turn.id, "kind": "binary", "value": True}

    async def send(count: int) -> httpx2.Response:
        return await harness.api.post("/v1/feedback/batch", json={"items": [item] * count})

    assert (await send(4)).status_code == 200
    assert error_of(await send(2)) == (429, "project_limit")
    assert (await harness.vote(turn.id)).status_code == 201
    assert error_of(await harness.vote(turn.id)) == (429, "project_limit")


@pytest.mark.parametrize("limit", ["requests_per_minute", "feedback_per_minute"])
async def test_browser_tokens_count_as_the_project(harness: Harness, limit: str) -> None:
    turn = await harness.turn()
    tokens = []
    for _ in range(2):
        body = {"completion_id": turn.id, "kinds": ["binary"]}
        tokens.append((await harness.api.post("/v1/feedback/tokens", json=body)).json()["token"])
    assert (await set_limits(harness, **{limit: 1})).status_code == 200
    vote = {"completion_id": turn.id, "kind": "binary", "value": "up"}
    first, second = [await harness.api.post("/v1/feedback", json=vote, headers=bearer(token)) for token in tokens]
    assert first.status_code == 201
    assert error_of(second) == (429, "project_limit") and limit in second.text
    assert error_of(await harness.vote(turn.id)) == (429, "project_limit"), "keys and tokens count together"


async def test_output_tokens_of_a_day(harness: Harness, scripted: ScriptedEngine) -> None:
    assert (await set_limits(harness, output_tokens_per_day=1)).status_code == 200
    assert (await harness.api.post("/v1/chat/completions", json=CHAT)).status_code == 200
    for path, body in (("/v1/chat/completions", CHAT), ("/v1/responses", {"model": "shop", "input": "Open?"})):
        answer = await harness.api.post(path, json=body)
        assert error_of(answer) == (429, "project_limit") and "output_tokens_per_day" in answer.text
    answer = await harness.api.post("/v1/messages", json=CHAT | {"max_tokens": 9})
    assert answer.status_code == 429 and "output_tokens_per_day" in answer.text
    assert (await harness.api.get("/v1/models")).status_code == 200


async def test_bytes_of_datasets(harness: Harness) -> None:
    file = to_parquet({"prompt": ["Open?"]})
    assert (await set_limits(harness, dataset_bytes=len(file) + 1)).status_code == 200
    assert (await import_file(harness, file, kind="prompts")).status_code == 201
    other = await import_file(harness, to_parquet({"prompt": ["Shut?"]}), kind="prompts", name="other")
    assert error_of(other) == (409, "project_limit") and "dataset_bytes" in other.text


async def test_pins(harness: Harness) -> None:
    assert (await set_limits(harness, pins=1)).status_code == 200

    async def pin(subject: str) -> httpx2.Response:
        body = {"kind": "user", "subject": subject, "version": 0}
        return await harness.api.put("/v1/policies/shop/pins", json=body)

    assert [(await pin(subject)).status_code for subject in ("ada", "ada", "bob")] == [200, 200, 409]
    assert error_of(await pin("bob")) == (409, "project_limit")


@pytest.mark.parametrize("kind", ["CODE", "LLM_JUDGE"])
async def test_feedback_of_programs_needs_its_scope(harness: Harness, kind: str) -> None:
    turn = await harness.turn()
    people = bearer((await create_key(harness, scopes=["feedback"]))["key"])
    programs = bearer((await create_key(harness, scopes=["feedback", "feedback:programs"]))["key"])
    item = {"completion_id": turn.id, "kind": "binary", "value": True}
    machine = {**item, "source": {"kind": kind, "id": "lint"}}
    refused = await harness.api.post("/v1/feedback", json=machine, headers=people)
    assert error_of(refused) == (403, "missing_scope") and "feedback:programs" in refused.text
    batch = await harness.api.post("/v1/feedback/batch", json={"items": [machine, item]}, headers=people)
    assert [one["status"] for one in batch.json()["data"]] == [403, 201]
    assert (await harness.api.post("/v1/feedback", json=machine, headers=programs)).status_code == 201
