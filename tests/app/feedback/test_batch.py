"""Batches: one result for each item, in order; an invalid item does not affect the others."""

from app.feedback.schemas import BatchResults
from app.models import Feedback
from tests.support.deployment import Harness
from tests.support.feedback_users import add_metadata


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
        {"completion_id": a.id, "kind": "binary", "value": "up", "id": "late"},  # its first try never got in
    ]
    response = await harness.api.post("/v1/feedback/batch", json={"items": items})
    assert response.status_code == 200, response.text
    BatchResults.model_validate(response.json())
    results = response.json()["data"]
    assert [one["index"] for one in results] == list(range(len(items)))
    assert [one["status"] for one in results] == [201, 404, 400, 400, 200, 422, 201, 201, 201, 404, 400, 404, 201]
    assert results[4]["feedback"] == results[0]["feedback"]
    assert results[8]["feedback"]["completion_id"] == b.id
    assert all(("error" in one) is (one["status"] >= 400) for one in results)
    assert {frozenset(one["error"]) for one in results if "error" in one} == {
        frozenset({"message", "type", "param", "code"})
    }
    assert len(await harness.all(Feedback)) == 5


async def test_repeated_batch_is_replayed_by_item_ids_or_key(harness: Harness) -> None:
    turn = await harness.turn()
    thumb = {"completion_id": turn.id, "kind": "binary", "value": "up"}
    body = {"items": [thumb, thumb | {"id": "own"}]}
    answers = [
        await harness.api.post("/v1/feedback/batch", json=body, headers={"Idempotency-Key": "n" * 250})
        for _ in range(2)
    ]
    first, again = [response.json()["data"] for response in answers]
    assert [one["status"] for one in first + again] == [201, 201, 200, 200]
    assert [one["feedback"] for one in first] == [one["feedback"] for one in again]
    assert len(await harness.all(Feedback)) == 2


async def test_batch_holds_at_most_1000_items(harness: Harness) -> None:
    turn = await harness.turn()
    items = [{"completion_id": turn.id, "kind": "binary", "value": "up", "id": f"k{number}"} for number in range(1000)]
    response = await harness.api.post("/v1/feedback/batch", json={"items": items})
    assert [one["status"] for one in response.json()["data"]] == [201] * 1000
    rows = await harness.all(Feedback)
    assert [row.idempotency_key for row in sorted(rows, key=lambda row: row.seq)] == [one["id"] for one in items]
    more = await harness.api.post("/v1/feedback/batch", json={"items": [*items, items[0]]})
    assert more.status_code == 400
    assert len(await harness.all(Feedback)) == 1000


async def test_malformed_batch_is_refused(harness: Harness) -> None:
    for body in ({}, {"items": []}, {"items": {}}, {"items": [{}], "more": 1}, {"items": None}):
        assert (await harness.api.post("/v1/feedback/batch", json=body)).status_code == 400
