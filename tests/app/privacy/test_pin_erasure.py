"""Pins of a data subject are counted, exported and erased, also from the audit log."""

from typing import Any

import orjson

from app.models import Audit, Pin, Turn
from app.projects import service as projects
from tests.app.deployments.test_pins import PINS, set_pin
from tests.app.privacy.test_erasure import CANARY, count_on_disk, create_turn, dump_tables, erase
from tests.support.deployment import Harness


async def pinned_subjects(harness: Harness) -> set[tuple[str, str]]:
    return {(row.kind, row.subject) for row in await harness.all(Pin)}


async def export_pins(harness: Harness) -> list[dict[str, Any]]:
    answer = await harness.api.get(f"/v1/subjects/{CANARY}/export")
    assert answer.status_code == 200
    return [row for row in map(orjson.loads, answer.text.splitlines()) if row["object"] == "pin"]


async def test_pins_of_subject_and_conversations_are_erased(harness: Harness) -> None:
    await create_turn(harness)
    await harness.turn(end_user="bob", conversation_id="bobs")
    for subject, kind in ((CANARY, "user"), (CANARY, "conversation"), ("bob", "user"), ("bobs", "conversation")):
        await set_pin(harness, subject, kind, reason=f"is {CANARY}" if subject == CANARY else "is bob")
    assert (await harness.api.get(f"/v1/subjects/{CANARY}")).json()["pins"] == 2
    assert [(row["kind"], row["subject"], row["reason"]) for row in await export_pins(harness)] == [
        ("user", CANARY, f"is {CANARY}"),
        ("conversation", CANARY, f"is {CANARY}"),
    ]
    assert (await erase(harness))["pins"] == 2
    assert await pinned_subjects(harness) == {("user", "bob"), ("conversation", "bobs")}
    assert CANARY not in await dump_tables(harness)
    assert count_on_disk(harness) == 0
    audits = sorted(await harness.all(Audit), key=lambda row: row.seq)
    entries = [(row.action, row.reason, row.details) for row in audits]
    assert [(action, reason, bool(details)) for action, reason, details in entries] == [
        ("pin.set", None, False),
        ("pin.set", None, False),
        ("pin.set", "is bob", True),
        ("pin.set", "is bob", True),
        ("subject.exported", None, False),
        ("subject.erased", None, True),
    ]
    assert entries[-1][2]["pins"] == 2


async def test_reasons_of_removed_pins_are_erased(harness: Harness) -> None:
    await create_turn(harness)
    for kind in ("user", "conversation"):
        pin = await set_pin(harness, CANARY, kind, reason=f"at the request of {CANARY}")
        assert (await harness.api.delete(f"{PINS}/{pin['id']}")).status_code == 200
    assert CANARY in await dump_tables(harness)
    assert (await erase(harness))["pins"] == 0
    assert CANARY not in await dump_tables(harness)


async def test_pin_of_shared_conversation_stays(harness: Harness) -> None:
    await create_turn(harness, conversation_id="a team's")
    others = await harness.turn(end_user="bob", conversation_id="a team's")
    await set_pin(harness, "a team's", "conversation", reason="a trial")
    assert [row["subject"] for row in await export_pins(harness)] == ["a team's"]
    assert (await erase(harness))["pins"] == 0
    assert await pinned_subjects(harness) == {("conversation", "a team's")}
    assert [row.reason for row in await harness.all(Audit) if row.action == "pin.set"] == ["a trial"]
    assert (await harness.get(Turn, others.id)).conversation_id == "a team's"
    assert (await erase(harness, "bob"))["pins"] == 1
    assert await pinned_subjects(harness) == set()


async def test_subject_with_only_a_pin_is_found(harness: Harness) -> None:
    await set_pin(harness, CANARY)
    summary = (await harness.api.get(f"/v1/subjects/{CANARY}")).json()
    assert (summary["turns"], summary["pins"]) == (0, 1)
    assert [row["subject"] for row in await export_pins(harness)] == [CANARY]
    assert (await erase(harness, f"HUMAN%2F{CANARY}"))["pins"] == 1, "under any of the subject's names"
    assert CANARY not in await dump_tables(harness)
    assert (await harness.api.get(f"/v1/subjects/{CANARY}")).status_code == 404
    assert (await erase(harness, f"HUMAN%2F{CANARY}"))["pins"] == 0


async def test_conversation_of_that_name_alone_is_no_subject(harness: Harness) -> None:
    await set_pin(harness, CANARY, "conversation")
    assert (await harness.api.get(f"/v1/subjects/{CANARY}")).status_code == 404
    assert (await harness.api.delete(f"/v1/subjects/{CANARY}")).status_code == 404
    assert await pinned_subjects(harness) == {("conversation", CANARY)}


async def test_pins_of_other_projects_stay(harness: Harness) -> None:
    await create_turn(harness)
    await set_pin(harness, CANARY)
    async with harness.db.write() as session:
        project, secret = await projects.create_project(session, "bakery", "bread", "some/model")
    for kind in ("user", "conversation"):
        answer = await harness.api.put(
            "/v1/policies/bread/pins",
            json={"kind": kind, "subject": CANARY, "version": 0, "reason": "ours"},
            headers={"authorization": f"Bearer {secret}"},
        )
        assert answer.status_code == 200
    assert (await erase(harness))["pins"] == 1
    assert {(row.project_id, row.kind) for row in await harness.all(Pin)} == {
        (project.id, "user"),
        (project.id, "conversation"),
    }
    reasons = [
        row.reason for row in await harness.all(Audit) if row.action == "pin.set" and row.project_id == project.id
    ]
    assert reasons == ["ours", "ours"]
