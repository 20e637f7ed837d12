"""Batches: one result for each item. Withdrawals: a new row; the latest feedback of a source is effective."""

import asyncio
from typing import Any

from sqlalchemy import text

from app.feedback.repository import insert_feedback
from app.feedback.schemas import BatchResults
from app.models import Feedback, Reward
from tests.support.deployment import Harness
from tests.support.feedback_users import add_metadata, create_other_project_key
from workers.curate import curate


async def test_each_item_has_its_own_result(harness: Harness) -> None:
    a, b = [await harness.turn(conversation_id="c") for _ in range(2)]
    await add_metadata(harness, b.id, thread="t")
    items = [
        {"completion_id": a.id, "kind": "binary", "value": "up", "id": "k"},
        {"completion_id": "chatcmpl-nobody", "kind": "binary", "value": "up"},
        "nonsense",
        {"completion_id": a.id, "kind": "score", "value": 2},
        {"completion_id": a.id, "kind": "binary", "value": "up", "id": "k"},
        {"completion_id": a.id, "kind": "binary", "value": "down", "id": "k"},
        {"kind": "comparison", "value": [b.id, a.id]},
        {"kind": "comment", "value": "short", "target": {"conversation_id": "c"}},
        {"kind": "rating", "value": 5, "target": {"metadata": {"thread": "t"}}},
        {"kind": "rating", "value": 5, "target": {"metadata": {"thread": "T"}}},
        None,
        {"completion_id": "chatcmpl-nobody", "kind": "binary", "value": "up", "id": "late"},
        {"completion_id": a.id, "kind": "binary", "value": "up", "id": "late"},  # refused above, so this is no replay
    ]
    response = await harness.api.post("/v1/feedback/batch", json={"items": items})
    assert response.status_code == 200, response.text
    BatchResults.model_validate(response.json())
    results = response.json()["data"]
    assert [result["index"] for result in results] == list(range(len(items)))
    assert [result["status"] for result in results] == [201, 404, 400, 400, 200, 422, 201, 201, 201, 404, 400, 404, 201]
    reason = "later feedback of its source replaced it"  # the last item
    replaced = {"effective": False, "withdrawn": False, "trainable": False, "exclusion_reason": reason}
    assert results[4]["feedback"] == results[0]["feedback"] | replaced
    assert results[8]["feedback"]["completion_id"] == b.id
    assert all(("error" in result) is (result["status"] >= 400) for result in results)
    assert {frozenset(result["error"]) for result in results if "error" in result} == {
        frozenset({"message", "type", "param", "code"})
    }
    assert len(await harness.all(Feedback)) == 5


async def test_repeated_batch_is_replayed_by_item_ids_or_key(harness: Harness) -> None:
    turn = await harness.turn()
    item = {"completion_id": turn.id, "kind": "binary", "value": "up"}
    body = {"items": [item, item | {"id": "own"}]}
    responses = [
        await harness.api.post("/v1/feedback/batch", json=body, headers={"Idempotency-Key": "n" * 250})
        for _ in range(2)
    ]
    first, again = [response.json()["data"] for response in responses]
    assert [result["status"] for result in first + again] == [201, 201, 200, 200]
    replaced = {"effective": False, "trainable": False, "exclusion_reason": "later feedback of its source replaced it"}
    state = {"effective": True, "withdrawn": False}
    assert [result["feedback"] for result in again] == [
        first[0]["feedback"] | state | replaced,
        first[1]["feedback"] | state,
    ]
    assert len(await harness.all(Feedback)) == 2


async def test_batch_holds_at_most_1000_items(harness: Harness) -> None:
    turn = await harness.turn()
    vote = {"completion_id": turn.id, "kind": "binary", "value": "up"}
    items = [{**vote, "id": f"k{number}", "source": {"id": f"person-{number}"}} for number in range(1000)]
    response = await harness.api.post("/v1/feedback/batch", json={"items": items})
    assert [result["status"] for result in response.json()["data"]] == [201] * 1000
    rows = await harness.all(Feedback)
    assert [row.idempotency_key for row in sorted(rows, key=lambda row: row.seq)] == [item["id"] for item in items]
    more = await harness.api.post("/v1/feedback/batch", json={"items": [*items, items[0]]})
    assert more.status_code == 400
    assert len(await harness.all(Feedback)) == 1000


async def test_batch_is_recorded_in_its_order_whatever_the_plan_of_the_insert(harness: Harness) -> None:
    """A merge join, which PostgreSQL chooses for many rows, reads them in the order of their keys."""
    turn = await harness.turn()
    await harness.vote(turn.id, "up")
    [vote] = await harness.all(Feedback)
    columns = {column.key: getattr(vote, column.key) for column in Feedback.__table__.columns}
    del columns["seq"], columns["created_at"]
    keys = [f"k{number}" for number in reversed(range(20))]
    rows = [columns | {"id": f"fb-{key}", "idempotency_key": key} for key in keys]
    async with harness.db.write() as session:
        connection = await session.connection()
        if connection.dialect.name == "postgresql":
            for other in ("nestloop", "hashjoin"):
                await connection.execute(text(f"SET LOCAL enable_{other} = off"))
        await connection.run_sync(insert_feedback, rows)
    recorded = sorted(await harness.all(Feedback), key=lambda row: row.seq)
    assert [row.idempotency_key for row in recorded[1:]] == keys


async def test_malformed_batch_is_refused(harness: Harness) -> None:
    bodies: list[dict[str, Any]] = [{}, {"items": []}, {"items": {}}, {"items": [{}], "more": 1}, {"items": None}]
    for body in bodies:
        assert (await harness.api.post("/v1/feedback/batch", json=body)).status_code == 400


async def read_state(harness: Harness, feedback_id: str) -> tuple[bool, bool]:
    view = (await harness.api.get(f"/v1/feedback/{feedback_id}")).json()
    return view["effective"], view["withdrawn"]


async def test_latest_feedback_of_source_is_effective(harness: Harness) -> None:
    turn = await harness.turn()
    first = (await harness.vote(turn.id, "up")).json()["id"]
    by_ada = (await harness.vote(turn.id, "down", source={"id": "ada"})).json()["id"]
    by_name = (await harness.vote(turn.id, "down", name="tone")).json()["id"]
    assert await read_state(harness, first) == (True, False)
    last = (await harness.vote(turn.id, "down")).json()["id"]
    assert await read_state(harness, first) == (False, False)
    for other in (by_ada, by_name, last):
        assert await read_state(harness, other) == (True, False)


async def test_rating_replaces_binary_feedback_but_comment_does_not(harness: Harness) -> None:
    turn = await harness.turn()
    binary = (await harness.vote(turn.id, "up")).json()["id"]
    for kind, value in (("comment", "nice"), ("correction", "better"), ("categorical", "greeting")):
        response = await harness.api.post("/v1/feedback", json={"completion_id": turn.id, "kind": kind, "value": value})
        assert response.status_code == 201
    assert await read_state(harness, binary) == (True, False)
    await harness.api.post("/v1/feedback", json={"completion_id": turn.id, "kind": "rating", "value": 2})
    assert await read_state(harness, binary) == (False, False)


async def test_withdrawal_appends_one_row(harness: Harness) -> None:
    turn = await harness.turn()
    body = {"completion_id": turn.id, "kind": "binary", "value": True, "name": "tone", "source": {"id": "ada"}}
    submitted = (await harness.api.post("/v1/feedback", json=body)).json()
    withdrawn = await harness.api.delete(f"/v1/feedback/{submitted['id']}")
    assert withdrawn.status_code == 200 and withdrawn.json()["outcome"]["rule"] == "withdrawn"
    view = submitted | {"effective": False, "withdrawn": True, "outcome": withdrawn.json()["outcome"]}
    del view["trainable"], view["exclusion_reason"]
    assert withdrawn.json() == view
    again = await harness.api.delete(f"/v1/feedback/{submitted['id']}")
    assert (again.status_code, again.json()) == (200, withdrawn.json())
    original, withdrawal = sorted(await harness.all(Feedback), key=lambda row: row.seq)
    assert (original.id, original.value) == (submitted["id"], 1.0)
    assert (withdrawal.kind, withdrawal.value, withdrawal.raw_value) == ("withdrawal", None, None)
    assert withdrawal.withdraws == submitted["id"]
    for column in ("project_id", "target", "turn_id", "conversation_id", "name", "source_kind", "source_id"):
        assert getattr(withdrawal, column) == getattr(original, column)


async def test_replaced_feedback_cannot_be_withdrawn(harness: Harness) -> None:
    turn = await harness.turn()
    first = (await harness.vote(turn.id, "up")).json()["id"]
    await harness.vote(turn.id, "down")
    response = await harness.api.delete(f"/v1/feedback/{first}")
    assert (response.status_code, response.json()["withdrawn"]) == (200, False)
    assert len(await harness.all(Feedback)) == 2


async def test_no_feedback_is_effective_after_withdrawal(harness: Harness) -> None:
    turn = await harness.turn()
    first = (await harness.vote(turn.id, "up")).json()["id"]
    second = (await harness.vote(turn.id, "down")).json()["id"]
    await harness.api.delete(f"/v1/feedback/{second}")
    assert await read_state(harness, first) == (False, False)
    third = (await harness.vote(turn.id, "up")).json()["id"]
    assert await read_state(harness, third) == (True, False)
    assert await read_state(harness, second) == (False, True)


async def test_ten_concurrent_withdrawals_are_one(harness: Harness) -> None:
    turn = await harness.turn()
    feedback_id = (await harness.vote(turn.id)).json()["id"]
    responses = await asyncio.gather(*[harness.api.delete(f"/v1/feedback/{feedback_id}") for _ in range(10)])
    assert {response.status_code for response in responses} == {200}
    assert len(await harness.all(Feedback)) == 2


async def test_ranking_and_conversation_feedback_can_be_withdrawn(harness: Harness) -> None:
    a, b = [await harness.turn(conversation_id="c") for _ in range(2)]
    for body in (
        {"kind": "comparison", "value": [a.id, b.id]},
        {"kind": "score", "value": 0, "target": {"conversation_id": "c"}},
    ):
        feedback_id = (await harness.api.post("/v1/feedback", json=body)).json()["id"]
        assert (await harness.api.delete(f"/v1/feedback/{feedback_id}")).json()["withdrawn"] is True
    await curate(harness.db, harness.settings)
    assert all(row.processed for row in await harness.all(Feedback))
    assert await harness.all(Reward) == []


async def test_foreign_feedback_and_withdrawals_cannot_be_withdrawn(harness: Harness) -> None:
    turn = await harness.turn()
    feedback_id = (await harness.vote(turn.id)).json()["id"]
    assert (
        await harness.api.delete(f"/v1/feedback/{feedback_id}", headers=await create_other_project_key(harness))
    ).status_code == 404
    await harness.api.delete(f"/v1/feedback/{feedback_id}")
    [withdrawal] = [row for row in await harness.all(Feedback) if row.kind == "withdrawal"]
    assert (await harness.api.get(f"/v1/feedback/{withdrawal.id}")).status_code == 404
    assert (await harness.api.delete(f"/v1/feedback/{withdrawal.id}")).status_code == 404
