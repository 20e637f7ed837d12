"""A request that is sent again says whether its feedback still counts: withdrawn, replaced, its reply deleted, or not.

Alike for single requests, batches and the header Idempotency-Key.
"""

from typing import Any

import pytest
from sqlalchemy import update

from app.models import Feedback, Turn
from app.privacy.retention import remove_feedback
from tests.support.deployment import Harness
from tests.support.feedback_users import add_metadata

WAYS = ["id", "Idempotency-Key", "batch id", "batch Idempotency-Key"]
WITHDRAWN = "it was withdrawn; feedback with a new id counts again"
REPLACED = "later feedback of its source replaced it"
ERASED = "its reply was deleted"
way = pytest.mark.parametrize("way", WAYS)


async def send(harness: Harness, way: str, body: dict[str, Any], key: str = "k") -> tuple[int, dict[str, Any]]:
    """Send feedback with the key in one of the WAYS; return its status and the feedback, or the error."""
    by_header = way.endswith("Idempotency-Key")
    item, headers = (body, {"Idempotency-Key": key}) if by_header else (body | {"id": key}, {})
    if not way.startswith("batch"):
        response = await harness.api.post("/v1/feedback", json=item, headers=headers)
        return response.status_code, response.json()
    response = await harness.api.post("/v1/feedback/batch", json={"items": [item]}, headers=headers)
    [result] = response.json()["data"]
    return result["status"], result.get("feedback") or result


def state(view: dict[str, Any]) -> tuple[bool, bool, bool | None, str | None]:
    return view["effective"], view["withdrawn"], view["trainable"], view["exclusion_reason"]


def thumb(turn: Turn, value: str = "up", **fields: Any) -> dict[str, Any]:
    return {"completion_id": turn.id, "kind": "binary", "value": value, **fields}


@way
async def test_replay_of_feedback_that_counts_is_the_first_answer(harness: Harness, way: str) -> None:
    body = thumb(await harness.turn())
    status, first = await send(harness, way, body)
    again = await send(harness, way, body)
    assert (status, "withdrawn" in first) == (201, False)
    assert again == (200, first | {"effective": True, "withdrawn": False})


@way
async def test_replay_of_withdrawn_feedback_says_so(harness: Harness, way: str) -> None:
    turn = await harness.turn()
    _, first = await send(harness, way, thumb(turn))
    await harness.api.delete(f"/v1/feedback/{first['id']}")
    status, again = await send(harness, way, thumb(turn))
    assert (status, state(again)) == (200, (False, True, False, WITHDRAWN))
    assert again | {"trainable": True, "exclusion_reason": None} == first | {"effective": False, "withdrawn": True}
    view = (await harness.api.get(f"/v1/feedback/{first['id']}")).json()
    assert (view["effective"], view["withdrawn"]) == (False, True)
    status, other = await send(harness, way, thumb(turn), key="k2")
    assert (status, other["trainable"]) == (201, True)
    view = (await harness.api.get(f"/v1/feedback/{other['id']}")).json()
    assert (view["effective"], view["withdrawn"]) == (True, False)
    assert len(await harness.all(Feedback)) == 3


@way
async def test_withdrawn_feedback_with_another_value_is_refused(harness: Harness, way: str) -> None:
    turn = await harness.turn()
    _, first = await send(harness, way, thumb(turn))
    await harness.api.delete(f"/v1/feedback/{first['id']}")
    status, answer = await send(harness, way, thumb(turn, "down"))
    assert (status, answer["error"]["code"]) == (422, "idempotency_key_reused")
    assert "with an id of its own" in answer["error"]["message"]


@way
async def test_replay_of_replaced_feedback_says_so(harness: Harness, way: str) -> None:
    turn = await harness.turn()
    await send(harness, way, thumb(turn))
    await send(harness, way, {"completion_id": turn.id, "kind": "rating", "value": 2}, key="k2")
    status, again = await send(harness, way, thumb(turn))
    assert (status, state(again)) == (200, (False, False, False, REPLACED))


@way
async def test_replay_after_its_reply_was_deleted_says_so(harness: Harness, way: str) -> None:
    turn = await harness.turn()
    await send(harness, way, thumb(turn))
    await harness.api.delete(f"/v1/chat/completions/{turn.id}")
    status, again = await send(harness, way, thumb(turn))
    assert (status, state(again)) == (200, (True, False, False, ERASED))
    status, other = await send(harness, way, thumb(turn), key="k2")
    assert (status, other["error"]["param"]) == (404, "completion_id")


async def test_feedback_of_other_sources_is_not_withdrawn(harness: Harness) -> None:
    turn = await harness.turn()
    ada, bob = thumb(turn, id="a", source="ada"), thumb(turn, id="b", source="bob")
    for body in (ada, bob):
        assert (await harness.api.post("/v1/feedback", json=body)).status_code == 201
    id = (await harness.api.get("/v1/feedback", params={"completion_id": turn.id})).json()["data"][0]["id"]
    await harness.api.delete(f"/v1/feedback/{id}")
    answers = (await harness.api.post("/v1/feedback/batch", json={"items": [ada, bob]})).json()["data"]
    assert [state(answer["feedback"]) for answer in answers] == [
        (False, True, False, WITHDRAWN),
        (True, False, True, None),
    ]


async def test_replay_in_the_batch_that_replaced_it_says_so(harness: Harness) -> None:
    turn = await harness.turn()
    items = [thumb(turn, id="a"), thumb(turn, "down", id="b"), thumb(turn, id="a"), thumb(turn, "down", id="b")]
    answers = (await harness.api.post("/v1/feedback/batch", json={"items": items})).json()["data"]
    assert [answer["status"] for answer in answers] == [201, 201, 200, 200]
    assert [state(answer["feedback"]) for answer in answers[2:]] == [
        (False, False, False, REPLACED),
        (True, False, True, None),
    ]


async def test_withdrawn_comments_rankings_and_conversations_say_so(harness: Harness) -> None:
    a, b = [await harness.turn(conversation_id="c") for _ in range(2)]
    items = [
        {"kind": "comment", "value": "short", "completion_id": a.id, "id": "comment"},
        {"kind": "comparison", "value": [a.id, b.id], "id": "comparison"},
        {"kind": "rating", "value": 5, "target": {"conversation_id": "c"}, "id": "conversation"},
    ]
    for item in items:
        first = (await harness.api.post("/v1/feedback", json=item)).json()
        again = (await harness.api.post("/v1/feedback", json=item)).json()
        assert again == first | {"effective": True, "withdrawn": False}
        await harness.api.delete(f"/v1/feedback/{first['id']}")
        again = (await harness.api.post("/v1/feedback", json=item)).json()
        assert state(again) == (False, True, False, WITHDRAWN)


async def test_rankings_and_conversations_without_replies_say_so(harness: Harness) -> None:
    a = await harness.turn(conversation_id="c")
    b = await harness.turn(conversation_id="c", parent_id=a.id)
    items = [
        {"kind": "comparison", "value": [a.id, b.id], "id": "comparison"},
        {"kind": "rating", "value": 5, "target": {"conversation_id": "c"}, "id": "conversation"},
        {"kind": "rating", "value": 5, "target": {"conversation_id": "c", "turn": 1}, "id": "turn"},
    ]
    expected = [(True, True), (True, None), (True, True)]
    for turn in (b, a):
        answers = (await harness.api.post("/v1/feedback/batch", json={"items": items})).json()["data"]
        answers = (await harness.api.post("/v1/feedback/batch", json={"items": items})).json()["data"]
        assert [state(answer["feedback"])[::2] for answer in answers] == expected
        await harness.api.delete(f"/v1/chat/completions/{turn.id}")
    answers = (await harness.api.post("/v1/feedback/batch", json={"items": items})).json()["data"]
    assert [answer["status"] for answer in answers] == [200, 200, 200]
    assert [state(answer["feedback"]) for answer in answers] == [(True, False, False, ERASED)] * 3


async def test_trainability_of_a_replay_is_that_of_the_reply_it_is_about(harness: Harness) -> None:
    old = await harness.turn(created_at=1.0)
    await add_metadata(harness, old.id, thread="t")
    body = {"kind": "binary", "value": "up", "target": {"metadata": {"thread": "t"}}, "id": "k"}
    assert (await harness.api.post("/v1/feedback", json=body)).json()["trainable"] is True
    new = await harness.turn(exclusion_reason="greedy decoding: the reply was not sampled")
    await add_metadata(harness, new.id, thread="t")
    again = (await harness.api.post("/v1/feedback", json=body)).json()
    assert (again["completion_id"], state(again)) == (old.id, (True, False, True, None))


async def test_replay_of_expired_feedback_says_that_its_reply_is_gone(harness: Harness) -> None:
    turn = await harness.turn()
    body = thumb(turn, id="k", source="ada")
    await harness.api.post("/v1/feedback", json=body)
    [row] = await harness.all(Feedback)
    async with harness.db.write() as session:
        await session.execute(update(Turn).values(deleted_at=1.0))
        await session.execute(update(Feedback).values(created_at=1.0, processed=True))
        assert await remove_feedback(session, turn.project_id, 1.0, [row.seq]) == 1
    response = await harness.api.post("/v1/feedback", json=body)
    assert (response.status_code, state(response.json())) == (200, (True, False, False, ERASED))


async def test_feedback_of_an_erased_person_is_new_when_it_is_sent_again(harness: Harness) -> None:
    turn = await harness.turn()
    body = thumb(turn, id="k", source="ada")
    first = (await harness.api.post("/v1/feedback", json=body)).json()
    assert (await harness.api.delete("/v1/subjects/ada")).status_code == 200
    response = await harness.api.post("/v1/feedback", json=body)
    assert (response.status_code, response.json()["id"] != first["id"]) == (201, True)


async def test_browser_token_learns_that_its_vote_was_withdrawn(harness: Harness) -> None:
    turn = await harness.turn()
    fields = {"completion_id": turn.id, "kinds": ["binary"], "source_id": "ada"}
    token = (await harness.api.post("/v1/feedback/tokens", json=fields)).json()["token"]
    headers = {"authorization": f"Bearer {token}"}
    first = (await harness.api.post("/v1/feedback", json=thumb(turn, id="k"), headers=headers)).json()
    await harness.api.delete(f"/v1/feedback/{first['id']}")
    again = await harness.api.post("/v1/feedback", json=thumb(turn, id="k"), headers=headers)
    assert (again.status_code, state(again.json())) == (200, (False, True, False, WITHDRAWN))
    assert "outcome" not in again.json(), "a token cannot read"
