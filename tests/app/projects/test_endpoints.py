"""/v1/keys and /v1/project: what an admin may and may not do."""

import asyncio
from typing import Any

import httpx2
import pytest

from app.models import ApiKey, Audit
from tests.support.deployment import Harness


async def create_key(harness: Harness, **fields: Any) -> dict[str, Any]:
    answer = await harness.api.post("/v1/keys", json=fields)
    assert answer.status_code == 201, answer.text
    view: dict[str, Any] = answer.json()
    return view


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


async def default_key_id(harness: Harness) -> str:
    """Return the id of the harness's own key."""
    listed = (await harness.api.get("/v1/keys")).json()["data"]
    return next(str(row["id"]) for row in listed if harness.key.startswith(row["prefix"]))


async def test_new_key_is_shown_once_then_only_its_prefix(harness: Harness) -> None:
    view = await create_key(
        harness, name="shop window", scopes=["feedback", "chat"], requests_per_minute=5, train=False
    )
    key = view.pop("key")
    assert key.startswith(view["prefix"]) and view["scopes"] == ["chat", "feedback"]
    assert (view["name"], view["requests_per_minute"], view["train"]) == ("shop window", 5, False)
    one = await harness.api.get(f"/v1/keys/{view['id']}")
    listed = await harness.api.get("/v1/keys")
    assert one.json() == view and view in listed.json()["data"]
    assert key not in one.text + listed.text
    assert (await harness.api.get("/v1/models", headers=bearer(key))).status_code == 200
    refused = await harness.api.get("/v1/keys", headers=bearer(key))
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "missing_scope")


async def test_expiry_uses_the_database_clock(harness: Harness) -> None:
    view = await create_key(harness, expires_in=3600)
    assert 3599 < view["expires_at"] - view["created_at"] < 3601


@pytest.mark.parametrize(
    "fields",
    [
        {"scopes": []},
        {"scopes": ["root"]},
        {"scopes": "admin"},
        {"expires_in": 0},
        {"expires_in": 1.5},
        {"expires_in": 10**12},
        {"train": "yes"},
        {"requests_per_minute": 0},
        {"max_concurrency": True},
        {"name": ""},
        {"name": "x" * 64},
        {"project_id": "proj-other"},
    ],
)
async def test_invalid_key_request_is_refused_and_creates_nothing(harness: Harness, fields: dict[str, Any]) -> None:
    answer = await harness.api.post("/v1/keys", json=fields)
    assert answer.status_code == 400 and answer.json()["error"]["param"].startswith(next(iter(fields)))
    assert len(await harness.all(ApiKey)) == 1


@pytest.mark.parametrize("limit", ["requests_per_minute", "max_concurrency"])
async def test_key_cannot_exceed_the_limits_of_the_deployment(harness: Harness, limit: str) -> None:
    largest = getattr(harness.settings.limits, limit)
    assert (await create_key(harness, **{limit: largest}))[limit] == largest
    answer = await harness.api.post("/v1/keys", json={limit: largest + 1})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (400, limit, "invalid_value")
    assert str(largest) in error["message"]
    assert len(await harness.all(ApiKey)) == 2


async def test_key_pages_list_each_key_once_in_order(harness: Harness) -> None:
    for number in range(5):
        await create_key(harness, name=f"key {number}")
    names, after = list[str | None](), dict[str, str]()
    while True:
        page = (await harness.api.get("/v1/keys", params={"limit": "2", **after})).json()
        assert (page["first_id"], page["last_id"]) == (page["data"][0]["id"], page["data"][-1]["id"])
        names += [row["name"] for row in page["data"]]
        if not page["has_more"]:
            break
        after = {"after": page["last_id"]}
    assert names == [None, *(f"key {number}" for number in range(5))]
    unknown = await harness.api.get("/v1/keys", params={"after": "key-x"})
    assert (unknown.status_code, unknown.json()["error"]["param"]) == (404, "after")


async def test_revoked_key_is_refused_at_once_and_revoking_is_idempotent(harness: Harness) -> None:
    view = await create_key(harness)
    key = view.pop("key")
    assert (await harness.api.get("/v1/models", headers=bearer(key))).status_code == 200
    first = await harness.api.delete(f"/v1/keys/{view['id']}")
    assert (await harness.api.get("/v1/models", headers=bearer(key))).status_code == 401
    repeated = await harness.api.delete(f"/v1/keys/{view['id']}")
    assert first.status_code == repeated.status_code == 200 and first.json() == repeated.json()
    assert first.json() == view | {"revoked_at": first.json()["revoked_at"]} and first.json()["revoked_at"] is not None
    assert len([row for row in await harness.all(Audit) if row.action == "key.revoked"]) == 1


@pytest.mark.parametrize("other", [None, {"scopes": ["chat"]}, {"expires_in": 1}])
async def test_last_admin_key_cannot_be_revoked(harness: Harness, other: dict[str, Any] | None) -> None:
    if other is not None:
        await create_key(harness, **other)
        await asyncio.sleep(1.1 if "expires_in" in other else 0)
    refused = await harness.api.delete(f"/v1/keys/{await default_key_id(harness)}")
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "last_admin_key")
    assert (await harness.api.get("/v1/models")).status_code == 200
    await create_key(harness, scopes=["admin"])
    assert (await harness.api.delete(f"/v1/keys/{await default_key_id(harness)}")).status_code == 200
    assert (await harness.api.get("/v1/models")).status_code == 401


async def test_two_admins_who_revoke_each_other_leave_one_key(harness: Harness) -> None:
    other = await create_key(harness)

    async def revoke(id: str, key: str) -> httpx2.Response:
        return await harness.api.delete(f"/v1/keys/{id}", headers=bearer(key))

    answers = await asyncio.gather(
        revoke(other["id"], harness.key), revoke(await default_key_id(harness), other["key"])
    )
    assert sorted(answer.status_code for answer in answers) in ([200, 401], [200, 409])
    assert len([row for row in await harness.all(ApiKey) if row.revoked_at is None]) == 1


async def test_project_reads_and_sets_its_own_consent(harness: Harness) -> None:
    before = (await harness.api.get("/v1/project")).json()
    assert (before["object"], before["name"], before["train"]) == ("project", "default", True)
    after = await harness.api.patch("/v1/project", json={"train": False})
    assert after.json() == before | {"train": False} == (await harness.api.get("/v1/project")).json()
    for invalid in ({}, {"train": None}, {"train": 1}, {"train": True, "name": "default_key_id"}):
        assert (await harness.api.patch("/v1/project", json=invalid)).status_code == 400


async def test_every_change_is_audited_without_the_key(harness: Harness) -> None:
    view = await create_key(harness, scopes=["chat"])
    await harness.api.delete(f"/v1/keys/{view['id']}")
    for _ in range(2):  # the second changes nothing
        await harness.api.patch("/v1/project", json={"train": False})
    rows = await harness.all(Audit)
    project = (await harness.policy()).project_id
    assert [(row.action, row.subject) for row in rows] == [
        ("key.created", view["id"]),
        ("key.revoked", view["id"]),
        ("project.consent_changed", project),
    ]
    assert all(row.actor == harness.key[:16] and row.project_id == project for row in rows)
    assert view["key"] not in str([row.details for row in rows])
