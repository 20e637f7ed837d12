"""Feedback read by completion and by conversation, in pages."""

import pytest

from app.feedback.schemas import FeedbackPage, FeedbackView
from tests.support.deployment import Harness


async def ids(harness: Harness, **params: str | int) -> list[str]:
    response = await harness.api.get("/v1/feedback", params=params)
    assert response.status_code == 200, response.text
    FeedbackPage.model_validate(response.json())
    return [row["id"] for row in response.json()["data"]]


async def test_list_by_completion_with_choices_and_rankings(harness: Harness) -> None:
    first, other = await harness.turn(), await harness.turn()
    await harness.turn(completion_id=first.id, choice_index=1)
    about_first = (await harness.vote(first.id)).json()["id"]
    about_second = (await harness.vote(first.id, choice_index=1)).json()["id"]
    value = [other.id, {"completion_id": first.id, "choice_index": 1}]
    ranked = (await harness.api.post("/v1/feedback", json={"kind": "comparison", "value": value})).json()["id"]
    assert await ids(harness, completion_id=first.id) == [about_first, about_second, ranked]
    assert await ids(harness, completion_id=first.id, choice_index=0) == [about_first]
    assert await ids(harness, completion_id=first.id, choice_index=1) == [about_second, ranked]
    assert await ids(harness, completion_id=other.id) == [ranked]


async def test_list_by_conversation_with_its_turns(harness: Harness) -> None:
    a, b = [await harness.turn(conversation_id="c") for _ in range(2)]
    other = await harness.turn(conversation_id="d")
    about_a = (await harness.vote(a.id)).json()["id"]
    await harness.vote(other.id)
    body = {"kind": "rating", "value": 5, "target": {"conversation_id": "c"}}
    about_conversation = (await harness.api.post("/v1/feedback", json=body)).json()["id"]
    both = (await harness.api.post("/v1/feedback", json={"kind": "comparison", "value": [b.id, a.id]})).json()["id"]
    assert await ids(harness, conversation_id="c") == [about_a, about_conversation, both]


@pytest.mark.parametrize("order", ["asc", "desc"])
async def test_pages_have_no_gap_or_overlap(harness: Harness, order: str) -> None:
    turn = await harness.turn()
    submitted = [(await harness.vote(turn.id, source={"id": f"u{number}"})).json()["id"] for number in range(5)]
    await harness.api.delete(f"/v1/feedback/{submitted[2]}")  # withdrawals are on no page
    ids_on_pages: list[str] = []
    params: dict[str, str | int] = {"completion_id": turn.id, "limit": 2, "order": order}
    for _ in range(3):
        page = (await harness.api.get("/v1/feedback", params=params)).json()
        ids_on_pages += [row["id"] for row in page["data"]]
        assert (page["first_id"], page["last_id"]) == (page["data"][0]["id"], page["data"][-1]["id"])
        params["after"] = page["last_id"]
        assert page["has_more"] is (len(ids_on_pages) < 5)
    assert ids_on_pages == (submitted if order == "asc" else submitted[::-1])
    rest = (await harness.api.get("/v1/feedback", params=params)).json()
    assert rest == {"object": "list", "data": [], "first_id": None, "last_id": None, "has_more": False}


async def test_effective_is_set_on_reads_and_trainable_when_submitted(harness: Harness) -> None:
    turn = await harness.turn()
    submitted = (await harness.vote(turn.id, "up", comment="ok", metadata={"k": "v"})).json()
    FeedbackView.model_validate(submitted)
    assert (submitted.pop("trainable"), submitted.pop("exclusion_reason")) == (True, None)
    await harness.vote(turn.id, "down")
    [first, second] = (await harness.api.get("/v1/feedback", params={"completion_id": turn.id})).json()["data"]
    assert first == submitted | {"effective": False, "withdrawn": False, "outcome": first["outcome"]}
    assert (first["outcome"]["rule"], second["outcome"]["waiting_for"]) == ("replaced", "processing")
    assert (second["effective"], second["withdrawn"]) == (True, False)
    assert (await harness.api.get(f"/v1/feedback/{submitted['id']}")).json() == first


async def test_invalid_query_is_refused(harness: Harness) -> None:
    queries: tuple[dict[str, str | int], ...] = (
        {},
        {"completion_id": "a", "conversation_id": "b"},
        {"completion_id": ""},
        {"completion_id": "a", "limit": 0},
        {"completion_id": "a", "limit": 1001},
        {"completion_id": "a", "order": "up"},
        {"completion_id": "a", "choice_index": -1},
        {"completion_id": "x" * 256},
    )
    for params in queries:
        assert (await harness.api.get("/v1/feedback", params=params)).status_code == 400


async def test_unknown_cursor_is_404(harness: Harness) -> None:
    turn = await harness.turn()
    response = await harness.api.get("/v1/feedback", params={"completion_id": turn.id, "after": "fb-nobody"})
    assert response.status_code == 404
