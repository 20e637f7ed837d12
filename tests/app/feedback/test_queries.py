"""Feedback read back by completion and by conversation, page by page."""

import pytest

from app.feedback.schemas import FeedbackPage, FeedbackView
from tests.support.deployment import Ring


async def ids(ring: Ring, **params: str | int) -> list[str]:
    answer = await ring.api.get("/v1/feedback", params=params)
    assert answer.status_code == 200, answer.text
    FeedbackPage.model_validate(answer.json())
    return [row["id"] for row in answer.json()["data"]]


async def test_by_completion_with_all_choices_and_what_ranks_them(ring: Ring) -> None:
    first, other = await ring.turn(), await ring.turn()
    await ring.turn(completion_id=first.id, choice_index=1)
    one = (await ring.thumb(first.id)).json()["id"]
    two = (await ring.thumb(first.id, choice_index=1)).json()["id"]
    value = [other.id, {"completion_id": first.id, "choice_index": 1}]
    ranked = (await ring.api.post("/v1/feedback", json={"kind": "comparison", "value": value})).json()["id"]
    assert await ids(ring, completion_id=first.id) == [one, two, ranked]
    assert await ids(ring, completion_id=first.id, choice_index=0) == [one]
    assert await ids(ring, completion_id=first.id, choice_index=1) == [two, ranked]
    assert await ids(ring, completion_id=other.id) == [ranked]


async def test_by_conversation_with_all_of_its_turns(ring: Ring) -> None:
    a, b = [await ring.turn(conversation_id="c") for _ in range(2)]
    elsewhere = await ring.turn(conversation_id="d")
    about_a = (await ring.thumb(a.id)).json()["id"]
    await ring.thumb(elsewhere.id)
    body = {"kind": "rating", "value": 5, "target": {"conversation_id": "c"}}
    whole = (await ring.api.post("/v1/feedback", json=body)).json()["id"]
    both = (await ring.api.post("/v1/feedback", json={"kind": "comparison", "value": [b.id, a.id]})).json()["id"]
    assert await ids(ring, conversation_id="c") == [about_a, whole, both]


@pytest.mark.parametrize("order", ["asc", "desc"])
async def test_pages_join_without_gap_or_overlap(ring: Ring, order: str) -> None:
    turn = await ring.turn()
    said = [(await ring.thumb(turn.id, source={"id": f"u{number}"})).json()["id"] for number in range(5)]
    await ring.api.delete(f"/v1/feedback/{said[2]}")  # tombstones are on no page
    seen, params = [], {"completion_id": turn.id, "limit": 2, "order": order}
    for _ in range(3):
        page = (await ring.api.get("/v1/feedback", params=params)).json()
        seen += [row["id"] for row in page["data"]]
        assert (page["first_id"], page["last_id"]) == (page["data"][0]["id"], page["data"][-1]["id"])
        params["after"] = page["last_id"]
        assert page["has_more"] is (len(seen) < 5)
    assert seen == (said if order == "asc" else said[::-1])
    rest = (await ring.api.get("/v1/feedback", params=params)).json()
    assert rest == {"object": "list", "data": [], "first_id": None, "last_id": None, "has_more": False}


async def test_a_view_says_whether_it_counts_and_an_acknowledgement_does_not_pretend_to_know(ring: Ring) -> None:
    turn = await ring.turn()
    said = (await ring.thumb(turn.id, "up", comment="ok", metadata={"k": "v"})).json()
    FeedbackView.model_validate(said)
    await ring.thumb(turn.id, "down")
    [first, second] = (await ring.api.get("/v1/feedback", params={"completion_id": turn.id})).json()["data"]
    assert first == said | {"counts": False, "withdrawn": False}
    assert (second["counts"], second["withdrawn"]) == (True, False)
    assert (await ring.api.get(f"/v1/feedback/{said['id']}")).json() == first


async def test_a_question_that_is_none_is_refused(ring: Ring) -> None:
    for params in (
        {},
        {"completion_id": "a", "conversation_id": "b"},
        {"completion_id": ""},
        {"completion_id": "a", "limit": 0},
        {"completion_id": "a", "limit": 1001},
        {"completion_id": "a", "order": "up"},
        {"completion_id": "a", "choice_index": -1},
        {"completion_id": "x" * 256},
    ):
        assert (await ring.api.get("/v1/feedback", params=params)).status_code == 400


async def test_an_unknown_cursor_is_a_404(ring: Ring) -> None:
    turn = await ring.turn()
    answer = await ring.api.get("/v1/feedback", params={"completion_id": turn.id, "after": "fb-nobody"})
    assert answer.status_code == 404
