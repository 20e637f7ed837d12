"""Pins: how admins set, change, list and remove them, their audit entries, and the versions that they allow."""

import asyncio
from itertools import pairwise
from typing import Any

import pytest

from app.core.jobs import PENDING_TASKS
from app.deployments import pins
from app.deployments.schemas import PinRequest
from app.deployments.version_router import VersionRouter
from app.models import ApiKey, Audit, Engine, Pin, PinKind, Version, VersionState, new_id
from app.policies.locks import lock_policy
from app.projects import service as projects
from app.projects.service import create_project
from tests.support.deployment import Harness

PINS = "/v1/policies/shop/pins"


async def set_pin(
    harness: Harness, subject: str = "bob", kind: str = "user", version: int = 0, **more: Any
) -> dict[str, Any]:
    answer = await harness.api.put(PINS, json={"kind": kind, "subject": subject, "version": version, **more})
    assert answer.status_code == 200, answer.text
    body: dict[str, Any] = answer.json()
    return body


async def test_pin_is_set_listed_and_removed(harness: Harness) -> None:
    pin_view = await set_pin(harness, reason="a tester")
    assert pin_view["created_at"] > 1e9
    assert {name: value for name, value in pin_view.items() if name not in ("id", "created_at")} == {
        "object": "pin",
        "policy": "shop",
        "kind": "user",
        "subject": "bob",
        "version": "shop@v0",
        "loaded": True,
        "reason": "a tester",
        "created_by": harness.key[:16],
    }
    assert (await harness.api.get(PINS)).json()["data"] == [pin_view]
    deleted = await harness.api.delete(f"{PINS}/{pin_view['id']}")
    assert (deleted.status_code, deleted.json()) == (
        200,
        {"id": pin_view["id"], "object": "pin.deleted", "deleted": True},
    )
    again = await harness.api.delete(f"{PINS}/{pin_view['id']}")
    assert (again.status_code, again.json()["error"]["param"]) == (404, "pin_id")
    assert (await harness.api.get(PINS)).json()["data"] == await harness.all(Pin) == []
    assert [
        (row.action, row.actor, row.subject, row.reason, row.details["kind"]) for row in await harness.all(Audit)
    ] == [
        ("pin.set", harness.key[:16], pin_view["id"], "a tester", "user"),
        ("pin.removed", harness.key[:16], pin_view["id"], None, "user"),
    ]


async def test_same_request_changes_nothing_and_another_version_changes_the_pin(harness: Harness) -> None:
    await harness.version(VersionState.SUPERSEDED)
    first = await set_pin(harness, reason="a tester")
    assert [await set_pin(harness), await set_pin(harness, reason="a tester")] == [first, first]
    assert len(await harness.all(Audit)) == 1
    changed = await set_pin(harness, version=1)
    assert (changed["id"], changed["version"], changed["reason"]) == (first["id"], "shop@v1", None)
    assert changed["created_at"] > first["created_at"]
    pin_view = await set_pin(harness, version=1, reason="she asked for it")
    assert (pin_view["id"], pin_view["reason"]) == (first["id"], "she asked for it")
    assert len(await harness.all(Pin)) == 1
    audits = [(row.reason, row.details["version"], row.details.get("previous")) for row in await harness.all(Audit)]
    assert audits == [("a tester", 0, None), (None, 1, 0), ("she asked for it", 1, 1)]


async def test_user_conversation_and_key_of_the_same_name_have_separate_pins(harness: Harness) -> None:
    [key] = await harness.all(ApiKey)
    ids = {(await set_pin(harness, key.id, kind))["id"] for kind in PinKind}
    assert len(ids) == len(await harness.all(Pin)) == 3


@pytest.mark.parametrize("state", list(VersionState))
async def test_pin_needs_a_version_that_served_traffic(harness: Harness, state: VersionState) -> None:
    version = await harness.version(state)
    answer = await harness.api.put(PINS, json={"kind": "user", "subject": "bob", "version": version.number})
    if state in ("trained", "verified", "shadow", "shadow_passed", "rejected"):
        assert (answer.status_code, answer.json()["error"]["code"]) == (409, "version_not_servable")
        assert await harness.all(Pin) == [] == await harness.all(Audit)
    else:
        assert (answer.status_code, answer.json()["version"]) == (200, "shop@v1")


async def test_pin_to_tainted_version_is_refused(harness: Harness) -> None:
    await harness.version(VersionState.SUPERSEDED, tainted_at=1.0)
    answer = await harness.api.put(PINS, json={"kind": "user", "subject": "bob", "version": 1})
    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "version_tainted")
    assert await harness.all(Pin) == []


@pytest.mark.parametrize(("policy", "version"), [("bread", 0), ("shop", 1), ("shop", 999_999_999)])
async def test_unknown_policy_or_version_is_not_found(harness: Harness, policy: str, version: int) -> None:
    body = {"kind": "user", "subject": "bob", "version": version}
    answer = await harness.api.put(f"/v1/policies/{policy}/pins", json=body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
    assert (await harness.api.get("/v1/policies/bread/pins")).status_code == 404
    assert (await harness.api.delete("/v1/policies/bread/pins/pin-1")).json()["error"]["code"] == "model_not_found"


@pytest.mark.parametrize(
    ("changed", "param"),
    [
        ({"kind": "policy"}, "kind"),
        ({"subject": ""}, "subject"),
        ({"subject": "x" * 513}, "subject"),
        ({"subject": "a\x00b"}, None),
        ({"subject": None}, "subject"),
        ({"kind": "conversation", "subject": "x" * 256}, "subject"),
        ({"version": -1}, "version"),
        ({"version": "1"}, "version"),
        ({"version": True}, "version"),
        ({"version": 10**9}, "version"),
        ({"reason": "x" * 2001}, "reason"),
        ({"share": 0.5}, "share"),
    ],
)
async def test_invalid_body_is_refused(harness: Harness, changed: dict[str, Any], param: str | None) -> None:
    answer = await harness.api.put(PINS, json={"kind": "user", "subject": "bob", "version": 0, **changed})
    assert answer.status_code == 400
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    assert answer.json()["error"]["param"] == param
    assert await harness.all(Pin) == []


async def test_longest_subjects_fit(harness: Harness) -> None:
    for kind, longest in (("user", 512), ("conversation", 255)):
        assert (await set_pin(harness, "ü" * longest, kind))["subject"] == "ü" * longest


async def test_key_is_found_by_id_or_prefix(harness: Harness) -> None:
    [key] = await harness.all(ApiKey)
    by_prefix = await set_pin(harness, key.prefix, "key")
    assert by_prefix["subject"] == key.id
    assert await set_pin(harness, key.id, "key") == by_prefix
    [row] = await harness.all(Audit)
    assert row.details == {"policy": "shop", "kind": "key", "version": 0, "key": key.id}


async def test_ambiguous_prefix_is_refused(harness: Harness) -> None:
    [key] = await harness.all(ApiKey)
    async with harness.db.write() as session:
        other_key, _ = await projects.create_key(session, key.project_id)
        other_key.prefix = key.prefix
    answer = await harness.api.put(PINS, json={"kind": "key", "subject": key.prefix, "version": 0})
    assert (answer.status_code, answer.json()["error"]["param"]) == (409, "subject")
    assert (await set_pin(harness, other_key.id, "key"))["subject"] == other_key.id


async def test_foreign_key_is_not_found_and_error_does_not_repeat_the_key(harness: Harness) -> None:
    async with harness.db.write() as session:
        project, secret = await create_project(session, "bakery", "bread", "some/model")
    [foreign] = [row for row in await harness.all(ApiKey) if row.project_id == project.id]
    for subject in (foreign.id, foreign.prefix, secret, harness.key):
        answer = await harness.api.put(PINS, json={"kind": "key", "subject": subject, "version": 0})
        assert (answer.status_code, answer.json()["error"]["param"]) == (404, "subject")
        assert subject not in answer.text
    assert await harness.all(Pin) == []


async def test_version_that_is_not_loaded_everywhere_notifies_the_reconciler(harness: Harness) -> None:
    version = await harness.version(VersionState.SUPERSEDED)
    assert (await set_pin(harness, version=1))["loaded"] is False
    request = PinRequest(kind=PinKind.USER, subject="eve", version=1)
    assert await enqueued_tasks(harness, request) == ["reconcile"]
    assert version.adapter_name is not None
    async with harness.db.write() as session:
        (await session.get_one(Engine, "engine-0")).loaded = [version.adapter_name]
    assert (await set_pin(harness, version=1))["loaded"] is True
    assert [row["loaded"] for row in (await harness.api.get(PINS)).json()["data"]] == [True, True]
    assert await enqueued_tasks(harness, request) == []
    async with harness.db.write() as session:
        session.add(Engine(name="engine-1", url="http://x", state="ready", incarnation=1, loaded=[]))
    assert (await set_pin(harness, version=1))["loaded"] is True, "one of two engines has loaded the version"
    assert await enqueued_tasks(harness, request) == ["reconcile"], "the other engine must load it too"


async def enqueued_tasks(harness: Harness, request: PinRequest) -> list[str]:
    policy = await harness.policy()
    async with harness.db.write() as session:
        await pins.set_pin(await lock_policy(session, policy.id), request, actor="test", limit=None)
        return list(session.info.get(PENDING_TASKS, []))


async def test_nothing_is_loaded_without_a_ready_engine(harness: Harness) -> None:
    async with harness.db.write() as session:
        (await session.get_one(Engine, "engine-0")).state = "lost"
    assert (await set_pin(harness))["loaded"] is False


async def test_pins_are_listed_in_pages_and_by_kind(harness: Harness) -> None:
    user_pins = {(await set_pin(harness, f"user-{number}"))["id"] for number in range(4)}
    conversation_pin = await set_pin(harness, "talk", "conversation")
    page = (await harness.api.get(PINS, params={"kind": "conversation"})).json()
    assert page["data"] == [conversation_pin]
    first = (await harness.api.get(PINS, params={"limit": 2})).json()
    assert (len(first["data"]), first["has_more"]) == (2, True)
    await harness.api.delete(f"{PINS}/{first['last_id']}")
    rest = (await harness.api.get(PINS, params={"after": first["last_id"]})).json()
    assert [row["id"] for row in first["data"] + rest["data"]] == sorted({*user_pins, conversation_pin["id"]}), (
        "a pin was removed between the pages"
    )
    assert rest["has_more"] is False
    assert (await harness.api.get(PINS, params={"kind": "policy"})).status_code == 400


async def test_audit_names_neither_user_nor_conversation(harness: Harness) -> None:
    for kind in ("user", "conversation"):
        pin = await set_pin(harness, "bob-5f1c0e", kind)
        await harness.api.delete(f"{PINS}/{pin['id']}")
    audits = await harness.all(Audit)
    assert len(audits) == 4
    assert "bob-5f1c0e" not in repr([(row.subject, row.reason, row.details) for row in audits])
    assert audits[0].details["subject_sha256"] != audits[2].details["subject_sha256"], (
        "a conversation and a user may have the same name"
    )


async def test_concurrent_requests_on_one_subject_leave_one_pin_and_one_entry_each(harness: Harness) -> None:
    for _ in range(3):
        await harness.version(VersionState.SUPERSEDED)
    pin_views = await asyncio.gather(*(set_pin(harness, version=number % 4) for number in range(12)))
    assert len({row["id"] for row in pin_views}) == 1
    [pin] = await harness.all(Pin)
    audits = sorted(await harness.all(Audit), key=lambda row: row.seq)
    numbers = [row.details["version"] for row in audits]
    assert (await harness.get(Version, pin.version_id)).number == numbers[-1]
    assert all(one != other for one, other in pairwise(numbers)), "each audit entry is a change"
    answers = await asyncio.gather(*(harness.api.delete(f"{PINS}/{pin.id}") for _ in range(4)))
    assert sorted(answer.status_code for answer in answers) == [200, 404, 404, 404]
    assert [row.action for row in await harness.all(Audit)].count("pin.removed") == 1


async def test_changed_pin_clears_the_route_cache(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[VersionRouter] = []

    def forget(router: VersionRouter) -> None:
        calls.append(router)

    monkeypatch.setattr(VersionRouter, "forget", forget)
    pin = await set_pin(harness)
    assert len(calls) == 1
    await harness.api.delete(f"{PINS}/{pin['id']}")
    assert len(calls) == 2
    await harness.api.delete(f"{PINS}/{pin['id']}")
    assert len(calls) == 2, "nothing has changed"


async def test_pins_need_an_admin_key(harness: Harness) -> None:
    async with harness.db.write() as session:
        project_id = (await harness.policy()).project_id
        _, secret = await projects.create_key(session, project_id, ("chat", "feedback"))
    headers = {"authorization": f"Bearer {secret}"}
    body = {"kind": "user", "subject": "bob", "version": 0}
    for method, path in (("PUT", PINS), ("GET", PINS), ("DELETE", f"{PINS}/{new_id('pin')}")):
        answer = await harness.api.request(method, path, json=body if method == "PUT" else None, headers=headers)
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "missing_scope")
