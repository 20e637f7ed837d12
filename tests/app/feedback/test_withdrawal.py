"""Append-only feedback: the latest of a source is effective, and a withdrawal is a new row."""

import asyncio

from app.models import Feedback, Reward
from tests.support.deployment import Harness
from tests.support.feedback_users import create_other_project_key
from workers.curate import curate


async def read_state(harness: Harness, feedback_id: str) -> tuple[bool, bool]:
    view = (await harness.api.get(f"/v1/feedback/{feedback_id}")).json()
    return view["effective"], view["withdrawn"]


async def test_latest_feedback_of_source_is_effective(harness: Harness) -> None:
    turn = await harness.turn()
    first = (await harness.thumb(turn.id, "up")).json()["id"]
    by_ada = (await harness.thumb(turn.id, "down", source={"id": "ada"})).json()["id"]
    by_name = (await harness.thumb(turn.id, "down", name="tone")).json()["id"]
    assert await read_state(harness, first) == (True, False)
    last = (await harness.thumb(turn.id, "down")).json()["id"]
    assert await read_state(harness, first) == (False, False)
    for other in (by_ada, by_name, last):
        assert await read_state(harness, other) == (True, False)


async def test_rating_replaces_binary_feedback_but_comment_does_not(harness: Harness) -> None:
    turn = await harness.turn()
    thumb = (await harness.thumb(turn.id, "up")).json()["id"]
    for kind, value in (("comment", "nice"), ("correction", "better"), ("categorical", "greeting")):
        response = await harness.api.post("/v1/feedback", json={"completion_id": turn.id, "kind": kind, "value": value})
        assert response.status_code == 201
    assert await read_state(harness, thumb) == (True, False)
    await harness.api.post("/v1/feedback", json={"completion_id": turn.id, "kind": "rating", "value": 2})
    assert await read_state(harness, thumb) == (False, False)


async def test_withdrawal_appends_one_row(harness: Harness) -> None:
    turn = await harness.turn()
    body = {"completion_id": turn.id, "kind": "binary", "value": True, "name": "tone", "source": {"id": "ada"}}
    raw_value = (await harness.api.post("/v1/feedback", json=body)).json()
    withdrawn = await harness.api.delete(f"/v1/feedback/{raw_value['id']}")
    assert (withdrawn.status_code, withdrawn.json()) == (200, raw_value | {"effective": False, "withdrawn": True})
    again = await harness.api.delete(f"/v1/feedback/{raw_value['id']}")
    assert (again.status_code, again.json()) == (200, withdrawn.json())
    original, withdrawal = sorted(await harness.all(Feedback), key=lambda row: row.seq)
    assert (original.id, original.value) == (raw_value["id"], 1.0)
    assert (withdrawal.kind, withdrawal.value, withdrawal.raw_value) == ("withdrawal", None, None)
    assert withdrawal.request_metadata == {"withdraws": raw_value["id"]}
    for column in ("project_id", "target", "turn_id", "conversation_id", "name", "source_kind", "source_id"):
        assert getattr(withdrawal, column) == getattr(original, column)


async def test_replaced_feedback_cannot_be_withdrawn(harness: Harness) -> None:
    turn = await harness.turn()
    first = (await harness.thumb(turn.id, "up")).json()["id"]
    await harness.thumb(turn.id, "down")
    response = await harness.api.delete(f"/v1/feedback/{first}")
    assert (response.status_code, response.json()["withdrawn"]) == (200, False)
    assert len(await harness.all(Feedback)) == 2


async def test_no_feedback_is_effective_after_withdrawal(harness: Harness) -> None:
    turn = await harness.turn()
    first = (await harness.thumb(turn.id, "up")).json()["id"]
    second = (await harness.thumb(turn.id, "down")).json()["id"]
    await harness.api.delete(f"/v1/feedback/{second}")
    assert await read_state(harness, first) == (False, False)
    third = (await harness.thumb(turn.id, "up")).json()["id"]
    assert await read_state(harness, third) == (True, False)
    assert await read_state(harness, second) == (False, True)


async def test_ten_concurrent_withdrawals_are_one(harness: Harness) -> None:
    turn = await harness.turn()
    raw_value = (await harness.thumb(turn.id)).json()["id"]
    answers = await asyncio.gather(*[harness.api.delete(f"/v1/feedback/{raw_value}") for _ in range(10)])
    assert {response.status_code for response in answers} == {200}
    assert len(await harness.all(Feedback)) == 2


async def test_ranking_and_conversation_feedback_can_be_withdrawn(harness: Harness) -> None:
    a, b = [await harness.turn(conversation_id="c") for _ in range(2)]
    for body in (
        {"kind": "comparison", "value": [a.id, b.id]},
        {"kind": "score", "value": 0, "target": {"conversation_id": "c"}},
    ):
        raw_value = (await harness.api.post("/v1/feedback", json=body)).json()["id"]
        assert (await harness.api.delete(f"/v1/feedback/{raw_value}")).json()["withdrawn"] is True
    await curate(harness.db, harness.settings)
    assert all(row.processed for row in await harness.all(Feedback))
    assert await harness.all(Reward) == []


async def test_foreign_feedback_and_withdrawals_cannot_be_withdrawn(harness: Harness) -> None:
    turn = await harness.turn()
    raw_value = (await harness.thumb(turn.id)).json()["id"]
    assert (
        await harness.api.delete(f"/v1/feedback/{raw_value}", headers=await create_other_project_key(harness))
    ).status_code == 404
    await harness.api.delete(f"/v1/feedback/{raw_value}")
    [withdrawal] = [row for row in await harness.all(Feedback) if row.kind == "withdrawal"]
    assert (await harness.api.get(f"/v1/feedback/{withdrawal.id}")).status_code == 404
    assert (await harness.api.delete(f"/v1/feedback/{withdrawal.id}")).status_code == 404
