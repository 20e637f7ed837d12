"""Append-only: the latest word of a source counts, and taking it back is one more row."""

import asyncio

from app.models import Feedback, Reward
from tests.support.deployment import Ring
from tests.support.feedback_users import stranger
from workers.feedback.curate import curate


async def standing(ring: Ring, feedback_id: str) -> tuple[bool, bool]:
    view = (await ring.api.get(f"/v1/feedback/{feedback_id}")).json()
    return view["counts"], view["withdrawn"]


async def test_the_latest_of_a_source_under_a_name_counts(ring: Ring) -> None:
    turn = await ring.turn()
    first = (await ring.thumb(turn.id, "up")).json()["id"]
    by_ada = (await ring.thumb(turn.id, "down", source={"id": "ada"})).json()["id"]
    by_name = (await ring.thumb(turn.id, "down", name="tone")).json()["id"]
    assert await standing(ring, first) == (True, False)
    last = (await ring.thumb(turn.id, "down")).json()["id"]
    assert await standing(ring, first) == (False, False)
    for other in (by_ada, by_name, last):
        assert await standing(ring, other) == (True, False)


async def test_a_comment_does_not_take_a_thumb_back_but_a_rating_replaces_it(ring: Ring) -> None:
    turn = await ring.turn()
    thumb = (await ring.thumb(turn.id, "up")).json()["id"]
    for kind, value in (("comment", "nice"), ("correction", "better"), ("categorical", "greeting")):
        answer = await ring.api.post("/v1/feedback", json={"completion_id": turn.id, "kind": kind, "value": value})
        assert answer.status_code == 201
    assert await standing(ring, thumb) == (True, False)
    await ring.api.post("/v1/feedback", json={"completion_id": turn.id, "kind": "rating", "value": 2})
    assert await standing(ring, thumb) == (False, False)


async def test_withdrawing_appends_a_tombstone_and_only_once(ring: Ring) -> None:
    turn = await ring.turn()
    body = {"completion_id": turn.id, "kind": "binary", "value": True, "name": "tone", "source": {"id": "ada"}}
    said = (await ring.api.post("/v1/feedback", json=body)).json()
    gone = await ring.api.delete(f"/v1/feedback/{said['id']}")
    assert (gone.status_code, gone.json()) == (200, said | {"counts": False, "withdrawn": True})
    again = await ring.api.delete(f"/v1/feedback/{said['id']}")
    assert (again.status_code, again.json()) == (200, gone.json())
    kept, tombstone = sorted(await ring.all(Feedback), key=lambda row: row.seq)
    assert (kept.id, kept.value) == (said["id"], 1.0)
    assert (tombstone.kind, tombstone.value, tombstone.said) == ("withdrawal", None, None)
    assert tombstone.details == {"withdraws": said["id"]}
    for column in ("project_id", "target", "turn_id", "conversation_id", "name", "source_kind", "source_id"):
        assert getattr(tombstone, column) == getattr(kept, column)


async def test_what_was_replaced_cannot_be_withdrawn_any_more(ring: Ring) -> None:
    turn = await ring.turn()
    first = (await ring.thumb(turn.id, "up")).json()["id"]
    await ring.thumb(turn.id, "down")
    answer = await ring.api.delete(f"/v1/feedback/{first}")
    assert (answer.status_code, answer.json()["withdrawn"]) == (200, False)
    assert len(await ring.all(Feedback)) == 2


async def test_after_a_withdrawal_nothing_counts_until_something_new_is_said(ring: Ring) -> None:
    turn = await ring.turn()
    first = (await ring.thumb(turn.id, "up")).json()["id"]
    second = (await ring.thumb(turn.id, "down")).json()["id"]
    await ring.api.delete(f"/v1/feedback/{second}")
    assert await standing(ring, first) == (False, False)
    third = (await ring.thumb(turn.id, "up")).json()["id"]
    assert await standing(ring, third) == (True, False)
    assert await standing(ring, second) == (False, True)


async def test_ten_withdrawals_at_once_are_one(ring: Ring) -> None:
    turn = await ring.turn()
    said = (await ring.thumb(turn.id)).json()["id"]
    answers = await asyncio.gather(*[ring.api.delete(f"/v1/feedback/{said}") for _ in range(10)])
    assert {answer.status_code for answer in answers} == {200}
    assert len(await ring.all(Feedback)) == 2


async def test_a_ranking_and_a_word_on_a_conversation_can_be_withdrawn(ring: Ring) -> None:
    a, b = [await ring.turn(conversation_id="c") for _ in range(2)]
    for body in (
        {"kind": "comparison", "value": [a.id, b.id]},
        {"kind": "score", "value": 0, "target": {"conversation_id": "c"}},
    ):
        said = (await ring.api.post("/v1/feedback", json=body)).json()["id"]
        assert (await ring.api.delete(f"/v1/feedback/{said}")).json()["withdrawn"] is True
    await curate(ring.db, ring.settings)
    assert all(row.curated for row in await ring.all(Feedback))
    assert await ring.all(Reward) == []


async def test_nobody_withdraws_what_is_not_theirs_and_no_tombstone_is_withdrawn(ring: Ring) -> None:
    turn = await ring.turn()
    said = (await ring.thumb(turn.id)).json()["id"]
    assert (await ring.api.delete(f"/v1/feedback/{said}", headers=await stranger(ring))).status_code == 404
    await ring.api.delete(f"/v1/feedback/{said}")
    [tombstone] = [row for row in await ring.all(Feedback) if row.kind == "withdrawal"]
    assert (await ring.api.get(f"/v1/feedback/{tombstone.id}")).status_code == 404
    assert (await ring.api.delete(f"/v1/feedback/{tombstone.id}")).status_code == 404
