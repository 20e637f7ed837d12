"""Feedback by a key of its sender: replaced, withdrawn, repeated, and in another order than it was sent."""

import itertools
import random
import time
from typing import Any

import pytest
from sqlalchemy import select

from app.feedback.effective import is_effective
from app.models import Feedback, FeedbackKey, Turn
from app.projects.service import create_project
from tests.support.deployment import Harness

KEY = "openwebui:f-1"


def thumb(turn: Turn, value: str = "up", **fields: Any) -> dict[str, Any]:
    return {"completion_id": turn.id, "kind": "binary", "value": value, "key": KEY, "source": "u-1", **fields}


async def send(harness: Harness, body: dict[str, Any], status: int = 201) -> dict[str, Any]:
    response = await harness.api.post("/v1/feedback", json=body)
    assert response.status_code == status, response.text
    view: dict[str, Any] = response.json()
    return view


async def withdraw(harness: Harness, status: int = 200, **params: Any) -> dict[str, Any]:
    response = await harness.api.delete("/v1/feedback", params={"key": KEY, **params})
    assert response.status_code == status, response.text
    view: dict[str, Any] = response.json()
    return view


async def effective(harness: Harness) -> list[tuple[str, Any]]:
    """Return the kind and the value of all feedback that counts."""
    async with harness.db.read() as session:
        rows = await session.execute(
            select(Feedback.kind, Feedback.raw_value).where(is_effective()).order_by(Feedback.seq)
        )
        return [(kind, value) for kind, value in rows]


async def test_new_content_replaces_the_earlier(harness: Harness) -> None:
    turn = await harness.turn()
    first = await send(harness, thumb(turn))
    second = await send(harness, thumb(turn, "down"))
    assert second["id"] != first["id"]
    assert await effective(harness) == [("binary", "down")]
    again = await send(harness, thumb(turn, "down"), 200)
    assert (again["id"], again["effective"]) == (second["id"], True)
    back = await send(harness, thumb(turn, "up"))
    assert back["id"] not in (first["id"], second["id"])
    assert await effective(harness) == [("binary", "up")]


@pytest.mark.parametrize(
    "changed",
    [
        {"kind": "comment", "value": "too short"},
        {"name": "tone"},
        {"source": "u-2"},
        {"kind": "rating", "value": 2},
        "another reply",
    ],
)
async def test_what_the_new_content_would_leave_is_withdrawn(harness: Harness, changed: Any) -> None:
    turn = await harness.turn()
    first = await send(harness, thumb(turn))
    other = {"completion_id": (await harness.turn()).id} if changed == "another reply" else changed
    second = await send(harness, thumb(turn) | other)
    assert await effective(harness) == [(second["kind"], second["raw_value"])]
    view = (await harness.api.get(f"/v1/feedback/{first['id']}")).json()
    assert view["effective"] is False


async def test_withdrawn_by_key_and_given_again(harness: Harness) -> None:
    turn = await harness.turn()
    await withdraw(harness, 404)
    first = await send(harness, thumb(turn))
    gone = await withdraw(harness)
    assert (gone["id"], gone["withdrawn"]) == (first["id"], True)
    assert (await withdraw(harness))["withdrawn"] is True
    assert await effective(harness) == []
    again = await send(harness, thumb(turn))
    assert again["id"] != first["id"]
    assert await effective(harness) == [("binary", "up")]


async def test_every_order_of_arrival_ends_in_the_state_that_was_sent_last(harness: Harness) -> None:
    now = time.time() - 100
    changes = [("up", now), ("down", now + 1), (None, now + 2), ("up", now + 3)]
    for last in (3, 4):
        for order in itertools.permutations(changes[:last]):
            turn = await harness.turn()
            key = f"k-{turn.id}"
            for value, sent_at in order:
                if value is None:
                    response = await harness.api.delete("/v1/feedback", params={"key": key, "sent_at": sent_at})
                    assert response.status_code in (200, 404, 409), response.text
                else:
                    body = thumb(turn, value, key=key, sent_at=sent_at)
                    response = await harness.api.post("/v1/feedback", json=body)
                    assert response.status_code in (201, 200, 409), response.text
            expected = [] if last == 3 else [("binary", "up")]
            async with harness.db.read() as session:
                query = select(Feedback.kind, Feedback.raw_value).where(is_effective(), Feedback.turn_id == turn.id)
                rows = [tuple(row) for row in await session.execute(query.order_by(Feedback.seq))]
            assert rows == expected, order


async def test_older_change_is_refused_and_says_why(harness: Harness) -> None:
    turn = await harness.turn()
    now = time.time()
    await send(harness, thumb(turn, "down", sent_at=now - 10))
    error = (await send(harness, thumb(turn, "up", sent_at=now - 20), 409))["error"]
    assert (error["code"], error["param"]) == ("superseded", "sent_at")
    assert (await withdraw(harness, 409, sent_at=now - 20))["error"]["code"] == "superseded"
    assert await effective(harness) == [("binary", "down")]


async def test_a_clock_that_is_ahead_does_not_hold_up_later_changes(harness: Harness) -> None:
    turn = await harness.turn()
    await send(harness, thumb(turn, "down", sent_at=time.time() + 10_000))
    await send(harness, thumb(turn, "up", sent_at=time.time() + 5_000))
    assert await effective(harness) == [("binary", "up")]


async def test_changes_of_one_key_in_one_batch(harness: Harness) -> None:
    turn, other = await harness.turn(), await harness.turn()
    items = [
        thumb(turn, "up"),
        thumb(turn, "up"),
        thumb(other, "down"),
        thumb(turn, "up", completion_id="chatcmpl-unknown"),
        thumb(turn, "down"),
        thumb(other, "up", key="another"),
    ]
    response = await harness.api.post("/v1/feedback/batch", json={"items": items})
    assert [result["status"] for result in response.json()["data"]] == [201, 200, 201, 404, 201, 201]
    assert await effective(harness) == [("binary", "down"), ("binary", "up")]
    keys = {row.key: row.feedback_id for row in await harness.all(FeedbackKey)}
    assert keys[KEY] == response.json()["data"][4]["feedback"]["id"]


async def test_refused_feedback_leaves_the_key_as_it_was(harness: Harness) -> None:
    turn = await harness.turn()
    first = await send(harness, thumb(turn))
    await send(harness, thumb(turn, completion_id="chatcmpl-unknown"), 404)
    assert await effective(harness) == [("binary", "up")]
    assert (await send(harness, thumb(turn), 200))["id"] == first["id"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"id": "x"}, "id"),
        ({"key": None, "sent_at": 1.0}, "sent_at"),
        ({"key": ""}, "key"),
        ({"key": "k" * 256}, "key"),
        ({"key": "a\x00b"}, "NUL"),
        ({"sent_at": "2026-11-26"}, "sent_at"),
        ({"sent_at": 1.7e12}, "sent_at"),
    ],
)
async def test_bad_keys_are_named(harness: Harness, fields: dict[str, Any], param: str) -> None:
    error = (await send(harness, thumb(await harness.turn()) | fields, 400))["error"]
    assert param in error["message"] or error["param"] == param
    assert await harness.all(Feedback) == []


async def test_keys_of_two_projects_are_two_keys(harness: Harness) -> None:
    turn = await harness.turn()
    first = await send(harness, thumb(turn))
    async with harness.db.write() as session:
        project, _ = await create_project(session, "bakery", "bread", "some/model")
        session.add(FeedbackKey(project_id=project.id, key=KEY, feedback_id=first["id"], revision=4, sent_at=2e9))
    second = await send(harness, thumb(turn, "down", sent_at=time.time()))
    keys = {row.project_id: (row.feedback_id, row.revision) for row in await harness.all(FeedbackKey)}
    assert keys == {project.id: (first["id"], 4), turn.project_id: (second["id"], 2)}


@pytest.mark.parametrize(
    "params", [{}, {"key": ""}, {"key": "k" * 256}, {"key": "k", "sent_at": "x"}, {"key": "k", "sent_at": "-1"}]
)
async def test_withdrawal_needs_a_key_that_can_be_stored(harness: Harness, params: dict[str, str]) -> None:
    response = await harness.api.delete("/v1/feedback", params=params)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == ("sent_at" if "sent_at" in params else "key")


async def test_withdrawal_by_a_key_with_nul_is_refused(harness: Harness) -> None:
    response = await harness.api.delete("/v1/feedback", params={"key": "a\x00"})
    assert (response.status_code, "NUL" in response.json()["error"]["message"]) == (400, True)


async def test_erased_feedback_leaves_no_key(harness: Harness) -> None:
    turn = await harness.turn()
    await send(harness, thumb(turn))
    assert (await harness.api.delete(f"/v1/chat/completions/{turn.id}")).status_code == 200
    assert (await harness.api.delete("/v1/subjects/u-1")).status_code == 200
    assert await harness.all(FeedbackKey) == []
    await send(harness, thumb(turn), 404)


async def test_many_keys_in_random_order_are_each_counted_once(harness: Harness) -> None:
    choose = random.Random(5)
    turns = [await harness.turn() for _ in range(20)]
    now = time.time() - 1000
    sent = []
    last: dict[str, str] = {}
    for step in range(100):
        turn, value = choose.choice(turns), choose.choice(["up", "down"])
        sent.append(thumb(turn, value, key=f"k-{turn.id}", sent_at=now + step))
        last[turn.id] = value
    sent += choose.sample(sent, 50)
    choose.shuffle(sent)
    for start in range(0, len(sent), 30):
        await harness.api.post("/v1/feedback/batch", json={"items": sent[start : start + 30]})
    async with harness.db.read() as session:
        query = (
            select(Feedback.turn_id, Feedback.raw_value).where(is_effective()).order_by(Feedback.turn_id, Feedback.seq)
        )
        rows = [tuple(row) for row in await session.execute(query)]
    assert rows == sorted(last.items())
