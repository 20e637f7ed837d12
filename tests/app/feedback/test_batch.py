"""Batches: a result for each item, in order, and none of them spoils another."""

from app.feedback.schemas import BatchAnswer
from app.models import Feedback
from tests.support.deployment import Harness
from tests.support.feedback_users import tag


async def test_each_item_has_its_own_result(harness: Harness) -> None:
    a, b = [await harness.turn(conversation_id="c") for _ in range(2)]
    await tag(harness, b.id, thread="t")
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
    answer = await harness.api.post("/v1/feedback/batch", json={"items": items})
    assert answer.status_code == 200, answer.text
    BatchAnswer.model_validate(answer.json())
    results = answer.json()["data"]
    assert [one["index"] for one in results] == list(range(len(items)))
    assert [one["status"] for one in results] == [201, 404, 400, 400, 200, 422, 201, 201, 201, 404, 400, 404, 201]
    assert results[4]["feedback"] == results[0]["feedback"]
    assert results[8]["feedback"]["completion_id"] == b.id
    assert all(("error" in one) is (one["status"] >= 400) for one in results)
    assert {frozenset(one["error"]) for one in results if "error" in one} == {
        frozenset({"message", "type", "param", "code"})
    }
    assert len(await harness.all(Feedback)) == 5


async def test_a_batch_again_is_replayed_by_the_ids_of_its_items_or_by_its_key(harness: Harness) -> None:
    turn = await harness.turn()
    thumb = {"completion_id": turn.id, "kind": "binary", "value": "up"}
    body = {"items": [thumb, thumb | {"id": "own"}]}
    answers = [
        await harness.api.post("/v1/feedback/batch", json=body, headers={"Idempotency-Key": "n" * 250})
        for _ in range(2)
    ]
    first, again = [answer.json()["data"] for answer in answers]
    assert [one["status"] for one in first + again] == [201, 201, 200, 200]
    assert [one["feedback"] for one in first] == [one["feedback"] for one in again]
    assert len(await harness.all(Feedback)) == 2


async def test_a_thousand_fit_and_one_more_does_not(harness: Harness) -> None:
    turn = await harness.turn()
    items = [{"completion_id": turn.id, "kind": "binary", "value": "up", "id": f"k{number}"} for number in range(1000)]
    answer = await harness.api.post("/v1/feedback/batch", json={"items": items})
    assert [one["status"] for one in answer.json()["data"]] == [201] * 1000
    rows = await harness.all(Feedback)
    assert [row.idempotency_key for row in sorted(rows, key=lambda row: row.seq)] == [one["id"] for one in items]
    more = await harness.api.post("/v1/feedback/batch", json={"items": [*items, items[0]]})
    assert more.status_code == 400
    assert len(await harness.all(Feedback)) == 1000


async def test_a_batch_that_is_none_is_refused(harness: Harness) -> None:
    for body in ({}, {"items": []}, {"items": {}}, {"items": [{}], "more": 1}, {"items": None}):
        assert (await harness.api.post("/v1/feedback/batch", json=body)).status_code == 400
