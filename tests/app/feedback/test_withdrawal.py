"""Append-only: the latest word of a source counts, and taking it back is one more row."""

import asyncio

from app.models import Feedback, Reward
from tests.support.deployment import Harness
from tests.support.feedback_users import stranger
from workers.feedback.curate import curate


async def standing(harness: Harness, feedback_id: str) -> tuple[bool, bool]:
    view = (await harness.api.get(f"/v1/feedback/{feedback_id}")).json()
    return view["counts"], view["withdrawn"]


async def test_the_latest_of_a_source_under_a_name_counts(harness: Harness) -> None:
    turn = await harness.turn()
    first = (await harness.thumb(turn.id, "up")).json()["id"]
    by_ada = (await harness.thumb(turn.id, "down", source={"id": "ada"})).json()["id"]
    by_name = (await harness.thumb(turn.id, "down", name="tone")).json()["id"]
    assert await standing(harness, first) == (True, False)
    last = (await harness.thumb(turn.id, "down")).json()["id"]
    assert await standing(harness, first) == (False, False)
    for other in (by_ada, by_name, last):
        assert await standing(harness, other) == (True, False)


async def test_a_comment_does_not_take_a_thumb_back_but_a_rating_replaces_it(harness: Harness) -> None:
    turn = await harness.turn()
    thumb = (await harness.thumb(turn.id, "up")).json()["id"]
    for kind, value in (("comment", "nice"), ("correction", "better"), ("categorical", "greeting")):
        answer = await harness.api.post("/v1/feedback", json={"completion_id": turn.id, "kind": kind, "value": value})
        assert answer.status_code == 201
    assert await standing(harness, thumb) == (True, False)
    await harness.api.post("/v1/feedback", json={"completion_id": turn.id, "kind": "rating", "value": 2})
    assert await standing(harness, thumb) == (False, False)


async def test_withdrawing_appends_a_tombstone_and_only_once(harness: Harness) -> None:
    turn = await harness.turn()
    body = {"completion_id": turn.id, "kind": "binary", "value": True, "name": "tone", "source": {"id": "ada"}}
    raw_value = (await harness.api.post("/v1/feedback", json=body)).json()
    gone = await harness.api.delete(f"/v1/feedback/{raw_value['id']}")
    assert (gone.status_code, gone.json()) == (200, raw_value | {"counts": False, "withdrawn": True})
    again = await harness.api.delete(f"/v1/feedback/{raw_value['id']}")
    assert (again.status_code, again.json()) == (200, gone.json())
    kept, tombstone = sorted(await harness.all(Feedback), key=lambda row: row.seq)
    assert (kept.id, kept.value) == (raw_value["id"], 1.0)
    assert (tombstone.kind, tombstone.value, tombstone.raw_value) == ("withdrawal", None, None)
    assert tombstone.request_metadata == {"withdraws": raw_value["id"]}
    for column in ("project_id", "target", "turn_id", "conversation_id", "name", "source_kind", "source_id"):
        assert getattr(tombstone, column) == getattr(kept, column)


async def test_what_was_replaced_cannot_be_withdrawn_any_more(harness: Harness) -> None:
    turn = await harness.turn()
    first = (await harness.thumb(turn.id, "up")).json()["id"]
    await harness.thumb(turn.id, "down")
    answer = await harness.api.delete(f"/v1/feedback/{first}")
    assert (answer.status_code, answer.json()["withdrawn"]) == (200, False)
    assert len(await harness.all(Feedback)) == 2


async def test_after_a_withdrawal_nothing_counts_until_something_new_is_said(harness: Harness) -> None:
    turn = await harness.turn()
    first = (await harness.thumb(turn.id, "up")).json()["id"]
    second = (await harness.thumb(turn.id, "down")).json()["id"]
    await harness.api.delete(f"/v1/feedback/{second}")
    assert await standing(harness, first) == (False, False)
    third = (await harness.thumb(turn.id, "up")).json()["id"]
    assert await standing(harness, third) == (True, False)
    assert await standing(harness, second) == (False, True)


async def test_ten_withdrawals_at_once_are_one(harness: Harness) -> None:
    turn = await harness.turn()
    raw_value = (await harness.thumb(turn.id)).json()["id"]
    answers = await asyncio.gather(*[harness.api.delete(f"/v1/feedback/{raw_value}") for _ in range(10)])
    assert {answer.status_code for answer in answers} == {200}
    assert len(await harness.all(Feedback)) == 2


async def test_a_ranking_and_a_word_on_a_conversation_can_be_withdrawn(harness: Harness) -> None:
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


async def test_nobody_withdraws_what_is_not_theirs_and_no_tombstone_is_withdrawn(harness: Harness) -> None:
    turn = await harness.turn()
    raw_value = (await harness.thumb(turn.id)).json()["id"]
    assert (await harness.api.delete(f"/v1/feedback/{raw_value}", headers=await stranger(harness))).status_code == 404
    await harness.api.delete(f"/v1/feedback/{raw_value}")
    [tombstone] = [row for row in await harness.all(Feedback) if row.kind == "withdrawal"]
    assert (await harness.api.get(f"/v1/feedback/{tombstone.id}")).status_code == 404
    assert (await harness.api.delete(f"/v1/feedback/{tombstone.id}")).status_code == 404
