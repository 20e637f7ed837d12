"""Pins of a subject: told, taken away and erased with the rest, and no name of theirs left in the audit."""

from typing import Any

import orjson

from app.models import Audit, Pin, Turn
from app.projects import service as projects
from tests.app.deployments.test_pins import PINS, put
from tests.app.privacy.test_erasure import CANARY, dumped, erase, on_disk, theirs
from tests.support.deployment import Harness


async def held(harness: Harness) -> set[tuple[str, str]]:
    return {(row.kind, row.subject) for row in await harness.all(Pin)}


async def exported(harness: Harness) -> list[dict[str, Any]]:
    answer = await harness.api.get(f"/v1/subjects/{CANARY}/export")
    assert answer.status_code == 200
    return [row for row in map(orjson.loads, answer.text.splitlines()) if row["object"] == "pin"]


async def test_their_pins_and_those_on_their_conversations_go_with_the_rest(harness: Harness) -> None:
    await theirs(harness)
    await harness.turn(end_user="bob", conversation_id="bobs")
    for subject, kind in ((CANARY, "user"), (CANARY, "conversation"), ("bob", "user"), ("bobs", "conversation")):
        await put(harness, subject, kind, reason=f"is {CANARY}" if subject == CANARY else "is bob")
    assert (await harness.api.get(f"/v1/subjects/{CANARY}")).json()["pins"] == 2
    assert [(row["kind"], row["subject"], row["reason"]) for row in await exported(harness)] == [
        ("user", CANARY, f"is {CANARY}"),
        ("conversation", CANARY, f"is {CANARY}"),
    ]
    assert (await erase(harness))["pins"] == 2
    assert await held(harness) == {("user", "bob"), ("conversation", "bobs")}
    assert CANARY not in await dumped(harness)
    assert on_disk(harness) == 0
    audits = sorted(await harness.all(Audit), key=lambda row: row.seq)
    entries = [(row.action, row.reason, row.details) for row in audits]
    assert [(action, reason, bool(details)) for action, reason, details in entries] == [
        ("pin", None, False),
        ("pin", None, False),
        ("pin", "is bob", True),
        ("pin", "is bob", True),
        ("erase subject", None, True),
    ]
    assert entries[-1][2]["pins"] == 2


async def test_why_they_were_held_before_is_forgotten_too(harness: Harness) -> None:
    await theirs(harness)
    for kind in ("user", "conversation"):
        pin = await put(harness, CANARY, kind, reason=f"{CANARY} has asked")
        assert (await harness.api.delete(f"{PINS}/{pin['id']}")).status_code == 200
    assert CANARY in await dumped(harness)
    assert (await erase(harness))["pins"] == 0
    assert CANARY not in await dumped(harness)


async def test_a_conversation_that_others_go_on_with_stays_held(harness: Harness) -> None:
    await theirs(harness, conversation_id="a team's")
    others = await harness.turn(end_user="bob", conversation_id="a team's")
    await put(harness, "a team's", "conversation", reason="a trial")
    assert [row["subject"] for row in await exported(harness)] == ["a team's"]
    assert (await erase(harness))["pins"] == 0
    assert await held(harness) == {("conversation", "a team's")}
    assert [row.reason for row in await harness.all(Audit) if row.action == "pin"] == ["a trial"]
    assert (await harness.get(Turn, others.id)).conversation_id == "a team's"
    assert (await erase(harness, "bob"))["pins"] == 1
    assert await held(harness) == set()


async def test_a_person_of_whom_only_a_pin_is_on_record_is_somebody(harness: Harness) -> None:
    await put(harness, CANARY)
    summary = (await harness.api.get(f"/v1/subjects/{CANARY}")).json()
    assert (summary["turns"], summary["pins"]) == (0, 1)
    assert [row["subject"] for row in await exported(harness)] == [CANARY]
    assert (await erase(harness, f"HUMAN%2F{CANARY}"))["pins"] == 1, "under each of their names"
    assert CANARY not in await dumped(harness)
    assert (await harness.api.get(f"/v1/subjects/{CANARY}")).status_code == 404
    assert (await erase(harness, f"HUMAN%2F{CANARY}"))["pins"] == 0


async def test_a_key_or_a_conversation_of_that_name_alone_is_nobody(harness: Harness) -> None:
    await put(harness, CANARY, "conversation")
    assert (await harness.api.get(f"/v1/subjects/{CANARY}")).status_code == 404
    assert (await harness.api.delete(f"/v1/subjects/{CANARY}")).status_code == 404
    assert await held(harness) == {("conversation", CANARY)}


async def test_another_projects_pins_are_left_alone(harness: Harness) -> None:
    await theirs(harness)
    await put(harness, CANARY)
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
    reasons = [row.reason for row in await harness.all(Audit) if row.action == "pin" and row.project_id == project.id]
    assert reasons == ["ours", "ours"]
