"""Idempotency keys of admin requests: one effect, however often a request is sent."""

import asyncio
from typing import Any

import httpx2
import pytest
from sqlalchemy import update

from app.core.database import now
from app.models import ApiKey, Audit, AuditAction, IdempotentRequest
from app.projects.idempotency import LIFETIME_SECONDS, KeyedRequest
from tests.support.deployment import Harness
from tests.support.trained_versions import publish

ROLLBACK = "/v1/policies/shop/rollback"
KEY = {"Idempotency-Key": "night-shift-1"}
# Feedback has idempotency keys of its own. A repeated chat is another sample,
# a file that was imported before is recognized by its hash, and a link to the console is used once.
WITHOUT_KEY = {
    *("/v1/chat/completions", "/v1/chat/completions/{completion_id}", "/v1/responses"),
    *("/v1/messages", "/v1/messages/count_tokens"),
    *("/v1/episodes/{episode_id}/chat/completions", "/v1/episodes/{episode_id}/responses"),
    "/v1/episodes/{episode_id}/end",  # the same report again changes nothing
    *("/v1/feedback/tokens", "/v1/datasets", "/v1/console/links"),
    # Each of these requests may be sent again: it names its run, its claim or its lease.
    "/v1/environments/runs",
    *(f"/v1/environments/runs/{{run}}/{act}" for act in ("claim", "renew", "cancel")),
    *(f"/v1/environments/runs/{{run}}/attempts/{{attempt_id}}/{act}" for act in ("start", "finish", "release")),
}


async def send(harness: Harness, path: str = ROLLBACK, body: Any = None, **headers: str) -> httpx2.Response:
    return await harness.api.post(path, json={} if body is None else body, headers={**KEY, **headers})


async def rollbacks(harness: Harness) -> int:
    return sum(entry.action == AuditAction.DEPLOYMENT_ROLLED_BACK for entry in await harness.all(Audit))


@pytest.fixture
async def two_releases(harness: Harness) -> None:
    """Two versions were deployed, so that a rollback could be made twice."""
    await publish(harness)
    await publish(harness)


async def test_repeated_request_has_one_effect_and_one_response(harness: Harness, two_releases: None) -> None:
    first, second = await send(harness), await send(harness)
    assert (first.status_code, second.status_code) == (200, 200), first.text
    assert first.content == second.content
    assert ("idempotent-replayed" in first.headers, second.headers["idempotent-replayed"]) == (False, "true")
    assert await rollbacks(harness) == 1
    assert (await harness.api.post(ROLLBACK, json={})).json() != first.json(), "without the key it rolls back again"


async def test_key_of_another_request_is_refused(harness: Harness, two_releases: None) -> None:
    assert (await send(harness)).status_code == 200
    for path, body in ((ROLLBACK, {"reason": "x"}), ("/v1/policies/shop/training/pause", {})):
        response = await send(harness, path, body)
        assert (response.status_code, response.json()["error"]["code"]) == (422, "idempotency_key_reused")
    assert await rollbacks(harness) == 1


async def test_request_that_failed_leaves_its_key_unused(harness: Harness) -> None:
    assert (await send(harness)).status_code == 409, "there is nothing to roll back to"
    assert await harness.all(IdempotentRequest) == []


async def test_requests_at_the_same_time_have_one_effect(harness: Harness, two_releases: None) -> None:
    responses = await asyncio.gather(*(send(harness) for _ in range(5)))
    succeeded = [response for response in responses if response.status_code == 200]
    refused = [response.json()["error"]["code"] for response in responses if response.status_code != 200]
    assert succeeded and set(refused) <= {"idempotency_key_in_use", "idempotency_key_used"}
    assert await rollbacks(harness) == 1
    assert (await send(harness)).content == succeeded[0].content


async def test_lost_response_is_not_an_invitation_to_repeat(
    harness: Harness, two_releases: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def lose(*_: Any) -> None:
        raise ConnectionError

    with monkeypatch.context() as patched:
        patched.setattr(KeyedRequest, "store", lose)
        assert (await send(harness)).status_code == 500
    response = await send(harness)
    assert (response.status_code, response.json()["error"]["code"]) == (409, "idempotency_key_used")
    assert await rollbacks(harness) == 1


async def test_secrets_are_not_stored(harness: Harness) -> None:
    before = len(await harness.all(ApiKey))
    created = await send(harness, "/v1/keys", {"scopes": ["chat"]})
    assert (created.status_code, created.headers["cache-control"]) == (201, "no-store")
    assert (await send(harness, "/v1/keys", {"scopes": ["chat"]})).status_code == 409
    assert len(await harness.all(ApiKey)) == before + 1
    assert [row.response for row in await harness.all(IdempotentRequest)] == [None]


async def test_keys_are_kept_for_a_day(harness: Harness, two_releases: None) -> None:
    assert (await send(harness)).status_code == 200
    async with harness.db.write() as session:
        await session.execute(update(IdempotentRequest).values(created_at=now() - LIFETIME_SECONDS))
    assert "idempotent-replayed" not in (await send(harness)).headers
    assert await rollbacks(harness) == 2
    assert len(await harness.all(IdempotentRequest)) == 1


async def test_caller_without_the_scope_uses_no_key(harness: Harness, two_releases: None) -> None:
    assert (await send(harness, authorization="Bearer sk-attune-unknown")).status_code == 401
    assert (await send(harness)).status_code == 200


async def test_admin_posts_take_a_key(harness: Harness) -> None:
    operations = (await harness.api.get("/openapi.json")).json()["paths"]
    without = {
        path
        for path, methods in operations.items()
        if "post" in methods
        and "idempotency-key" not in {each["name"].lower() for each in methods["post"].get("parameters", [])}
    }
    assert without == WITHOUT_KEY
