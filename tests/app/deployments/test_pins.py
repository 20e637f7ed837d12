"""Pins: set, moved, listed and removed by admins, on record in the audit, and never on what nobody has heard."""

import asyncio
from itertools import pairwise
from typing import Any

import pytest

from app.core.jobs import PENDING_TASKS
from app.deployments.pins import service
from app.deployments.pins.schemas import PinRequest
from app.deployments.router import VersionRouter
from app.models import ApiKey, Audit, Engine, Pin, PinKind, Version, VersionState, new_id
from app.projects import keys
from app.projects.service import create_project
from tests.support.deployment import Harness

PINS = "/v1/policies/shop/pins"


async def put(
    harness: Harness, subject: str = "bob", kind: str = "user", version: int = 0, **more: Any
) -> dict[str, Any]:
    answer = await harness.api.put(PINS, json={"kind": kind, "subject": subject, "version": version, **more})
    assert answer.status_code == 200, answer.text
    body: dict[str, Any] = answer.json()
    return body


async def test_a_pin_is_set_listed_and_removed(harness: Harness) -> None:
    told = await put(harness, reason="a tester")
    assert told["created_at"] > 1e9
    assert {name: value for name, value in told.items() if name not in ("id", "created_at")} == {
        "object": "pin",
        "policy": "shop",
        "kind": "user",
        "subject": "bob",
        "version": "shop@v0",
        "loaded": True,
        "reason": "a tester",
        "created_by": harness.key[:16],
    }
    assert (await harness.api.get(PINS)).json()["data"] == [told]
    gone = await harness.api.delete(f"{PINS}/{told['id']}")
    assert (gone.status_code, gone.json()) == (200, {"id": told["id"], "object": "pin.deleted", "deleted": True})
    again = await harness.api.delete(f"{PINS}/{told['id']}")
    assert (again.status_code, again.json()["error"]["param"]) == (404, "pin_id")
    assert (await harness.api.get(PINS)).json()["data"] == await harness.all(Pin) == []
    assert [
        (row.action, row.actor, row.subject, row.reason, row.details["kind"]) for row in await harness.all(Audit)
    ] == [
        ("pin", harness.key[:16], told["id"], "a tester", "user"),
        ("unpin", harness.key[:16], told["id"], None, "user"),
    ]


async def test_the_same_again_changes_nothing_and_another_version_moves_it(harness: Harness) -> None:
    await harness.version(VersionState.SUPERSEDED)
    first = await put(harness, reason="a tester")
    assert [await put(harness), await put(harness, reason="a tester")] == [first, first]
    assert len(await harness.all(Audit)) == 1
    moved = await put(harness, version=1)
    assert (moved["id"], moved["version"], moved["reason"]) == (first["id"], "shop@v1", None)
    assert moved["created_at"] > first["created_at"]
    told = await put(harness, version=1, reason="she asked for it")
    assert (told["id"], told["reason"]) == (first["id"], "she asked for it")
    assert len(await harness.all(Pin)) == 1
    audits = [(row.reason, row.details["version"], row.details.get("previous")) for row in await harness.all(Audit)]
    assert audits == [("a tester", 0, None), (None, 1, 0), ("she asked for it", 1, 1)]


async def test_a_user_a_conversation_and_a_key_of_one_name_are_three(harness: Harness) -> None:
    [key] = await harness.all(ApiKey)
    ids = {(await put(harness, key.id, kind))["id"] for kind in PinKind}
    assert len(ids) == len(await harness.all(Pin)) == 3


@pytest.mark.parametrize("state", list(VersionState))
async def test_only_what_people_have_heard_may_be_held_to(harness: Harness, state: VersionState) -> None:
    version = await harness.version(state)
    answer = await harness.api.put(PINS, json={"kind": "user", "subject": "bob", "version": version.number})
    if state in ("trained", "verified", "shadow", "shadow_passed", "rejected"):
        assert (answer.status_code, answer.json()["error"]["code"]) == (409, "version_not_servable")
        assert await harness.all(Pin) == [] == await harness.all(Audit)
    else:
        assert (answer.status_code, answer.json()["version"]) == (200, "shop@v1")


async def test_nobody_is_held_on_what_learned_from_erased_data(harness: Harness) -> None:
    await harness.version(VersionState.SUPERSEDED, tainted_at=1.0)
    answer = await harness.api.put(PINS, json={"kind": "user", "subject": "bob", "version": 1})
    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "version_erased")
    assert await harness.all(Pin) == []


@pytest.mark.parametrize(("policy", "version"), [("bread", 0), ("shop", 1), ("shop", 999_999_999)])
async def test_there_must_be_such_a_policy_and_such_a_version(harness: Harness, policy: str, version: int) -> None:
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
async def test_a_body_that_means_nothing_is_refused(
    harness: Harness, changed: dict[str, Any], param: str | None
) -> None:
    answer = await harness.api.put(PINS, json={"kind": "user", "subject": "bob", "version": 0, **changed})
    assert answer.status_code == 400
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    assert answer.json()["error"]["param"] == param
    assert await harness.all(Pin) == []


async def test_the_longest_subjects_fit(harness: Harness) -> None:
    for kind, longest in (("user", 512), ("conversation", 255)):
        assert (await put(harness, "ü" * longest, kind))["subject"] == "ü" * longest


async def test_a_key_is_named_by_its_id_or_by_its_prefix(harness: Harness) -> None:
    [key] = await harness.all(ApiKey)
    by_prefix = await put(harness, key.prefix, "key")
    assert by_prefix["subject"] == key.id
    assert await put(harness, key.id, "key") == by_prefix
    [row] = await harness.all(Audit)
    assert row.details == {"policy": "shop", "kind": "key", "version": 0, "key": key.id}


async def test_a_prefix_that_two_keys_have_is_not_guessed_at(harness: Harness) -> None:
    [key] = await harness.all(ApiKey)
    async with harness.db.write() as session:
        twin, _ = await keys.create(session, key.project_id)
        twin.prefix = key.prefix
    answer = await harness.api.put(PINS, json={"kind": "key", "subject": key.prefix, "version": 0})
    assert (answer.status_code, answer.json()["error"]["param"]) == (409, "subject")
    assert (await put(harness, twin.id, "key"))["subject"] == twin.id


async def test_a_key_of_another_project_is_not_found_and_a_whole_key_not_repeated(harness: Harness) -> None:
    async with harness.db.write() as session:
        project, secret = await create_project(session, "bakery", "bread", "some/model")
    [foreign] = [row for row in await harness.all(ApiKey) if row.project_id == project.id]
    for subject in (foreign.id, foreign.prefix, secret, harness.key):
        answer = await harness.api.put(PINS, json={"kind": "key", "subject": subject, "version": 0})
        assert (answer.status_code, answer.json()["error"]["param"]) == (404, "subject")
        assert subject not in answer.text
    assert await harness.all(Pin) == []


async def test_a_version_that_is_not_loaded_everywhere_says_so_and_rings_the_sweep(harness: Harness) -> None:
    version = await harness.version(VersionState.SUPERSEDED)
    assert (await put(harness, version=1))["loaded"] is False
    asked = PinRequest(kind=PinKind.USER, subject="eve", version=1)
    assert await rung(harness, asked) == ["reconcile"]
    async with harness.db.write() as session:
        (await session.get_one(Engine, "engine-0")).loaded = [version.adapter_name]
    assert (await put(harness, version=1))["loaded"] is True
    assert [row["loaded"] for row in (await harness.api.get(PINS)).json()["data"]] == [True, True]
    assert await rung(harness, asked) == []
    async with harness.db.write() as session:
        session.add(Engine(name="engine-1", url="http://x", state="ready", incarnation=1, loaded=[]))
    assert (await put(harness, version=1))["loaded"] is True, "one of two engines can answer"
    assert await rung(harness, asked) == ["reconcile"], "and the other is to hold it, too"


async def rung(harness: Harness, asked: PinRequest) -> list[str]:
    policy = await harness.policy()
    async with harness.db.write() as session:
        await service.pin(session, policy, asked, actor="test")
        return list(session.info.get(PENDING_TASKS, []))


async def test_without_a_ready_engine_nothing_is_loaded(harness: Harness) -> None:
    async with harness.db.write() as session:
        (await session.get_one(Engine, "engine-0")).state = "lost"
    assert (await put(harness))["loaded"] is False


async def test_pins_come_page_by_page_and_by_kind(harness: Harness) -> None:
    made = {(await put(harness, f"user-{number}"))["id"] for number in range(4)}
    talk = await put(harness, "talk", "conversation")
    talks = (await harness.api.get(PINS, params={"kind": "conversation"})).json()
    assert talks["data"] == [talk]
    first = (await harness.api.get(PINS, params={"limit": 2})).json()
    assert (len(first["data"]), first["has_more"]) == (2, True)
    await harness.api.delete(f"{PINS}/{first['last_id']}")
    rest = (await harness.api.get(PINS, params={"after": first["last_id"]})).json()
    assert [row["id"] for row in first["data"] + rest["data"]] == sorted({*made, talk["id"]}), "gone from under a pager"
    assert rest["has_more"] is False
    assert (await harness.api.get(PINS, params={"kind": "policy"})).status_code == 400


async def test_the_audit_names_neither_a_user_nor_a_conversation(harness: Harness) -> None:
    for kind in ("user", "conversation"):
        pin = await put(harness, "bob-5f1c0e", kind)
        await harness.api.delete(f"{PINS}/{pin['id']}")
    audits = await harness.all(Audit)
    assert len(audits) == 4
    assert "bob-5f1c0e" not in repr([(row.subject, row.reason, row.details) for row in audits])
    assert audits[0].details["whose"] != audits[2].details["whose"], "a conversation may be called like a user"


async def test_words_on_one_subject_at_once_leave_one_pin_and_one_entry_each(harness: Harness) -> None:
    for _ in range(3):
        await harness.version(VersionState.SUPERSEDED)
    told = await asyncio.gather(*(put(harness, version=number % 4) for number in range(12)))
    assert len({row["id"] for row in told}) == 1
    [pin] = await harness.all(Pin)
    audits = sorted(await harness.all(Audit), key=lambda row: row.seq)
    numbers = [row.details["version"] for row in audits]
    assert (await harness.get(Version, pin.version_id)).number == numbers[-1]
    assert all(one != other for one, other in pairwise(numbers)), "each entry is a move"
    answers = await asyncio.gather(*(harness.api.delete(f"{PINS}/{pin.id}") for _ in range(4)))
    assert sorted(answer.status_code for answer in answers) == [200, 404, 404, 404]
    assert [row.action for row in await harness.all(Audit)].count("unpin") == 1


async def test_this_process_looks_again_at_once(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    forgotten: list[int] = []

    def forget(routes: VersionRouter) -> None:
        forgotten.append(len(pins))

    monkeypatch.setattr(VersionRouter, "forget", forget)
    pins: list[dict[str, Any]] = []
    pins.append(await put(harness))
    assert len(forgotten) == 1
    await harness.api.delete(f"{PINS}/{pins[0]['id']}")
    assert len(forgotten) == 2
    await harness.api.delete(f"{PINS}/{pins[0]['id']}")
    assert len(forgotten) == 2, "nothing has changed"


async def test_only_an_admins_key_may(harness: Harness) -> None:
    async with harness.db.write() as session:
        project_id = (await harness.policy()).project_id
        _, secret = await keys.create(session, project_id, ("chat", "feedback"))
    headers = {"authorization": f"Bearer {secret}"}
    body = {"kind": "user", "subject": "bob", "version": 0}
    for method, path in (("PUT", PINS), ("GET", PINS), ("DELETE", f"{PINS}/{new_id('pin')}")):
        answer = await harness.api.request(method, path, json=body if method == "PUT" else None, headers=headers)
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "missing_scope")
