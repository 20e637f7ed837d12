"""What feedback may be about: a choice of a completion, a conversation, or whatever the caller's own pairs point at."""

from typing import Any

import httpx2
import pytest

from app.core.database import now
from app.core.errors import BadRequest
from app.feedback import kinds
from app.models import Feedback
from tests.support.deployment import Harness
from tests.support.feedback_users import shape, stranger, tag


async def say(
    harness: Harness, target: dict[str, Any] | None = None, headers: dict[str, str] | None = None, **fields: Any
) -> httpx2.Response:
    body = {"kind": "binary", "value": True, **({"target": target} if target is not None else {}), **fields}
    return await harness.api.post("/v1/feedback", json=body, headers=headers or {})


@pytest.mark.parametrize("inside", [True, False])
async def test_a_choice_of_a_completion_is_a_turn_of_its_own(harness: Harness, inside: bool) -> None:
    first = await harness.turn()
    second = await harness.turn(completion_id=first.id, choice_index=1)
    where = {"completion_id": first.id, "choice_index": 1}
    answer = await (say(harness, where) if inside else say(harness, **where))
    assert answer.status_code == 201, answer.text
    assert (answer.json()["completion_id"], answer.json()["choice_index"]) == (first.id, 1)
    [row] = await harness.all(Feedback)
    assert row.turn_id == second.id
    assert shape(await say(harness, completion_id=first.id, choice_index=2))[0] == 404


async def test_a_conversation_is_judged_as_a_whole(harness: Harness) -> None:
    await harness.turn(conversation_id="c-1")
    answer = await say(harness, {"conversation_id": "c-1"})
    assert answer.status_code == 201, answer.text
    assert (answer.json()["conversation_id"], answer.json()["completion_id"]) == ("c-1", None)
    [row] = await harness.all(Feedback)
    assert (row.turn_id, row.target, row.processed) == (None, "conversation:c-1", False)
    assert shape(await say(harness, {"conversation_id": "c-2"}))[0] == 404


async def test_pairs_of_metadata_must_all_match_and_the_newest_turn_counts(harness: Harness) -> None:
    old, new, other = [await harness.turn(created_at=float(second)) for second in (1, 2, 3)]
    await tag(harness, old.id, thread="a-long-thread-id", turn="1")
    await tag(harness, new.id, thread="a-long-thread-id", turn="2")
    await tag(harness, other.id, thread="another-thread-id", turn="2")
    for pairs, turn in [
        ({"thread": "a-long-thread-id"}, new),
        ({"thread": "a-long-thread-id", "turn": "1"}, old),
        ({"turn": "2"}, other),
        ({"turn": "2", "thread": "a-long-thread-id"}, new),
    ]:
        answer = await say(harness, {"metadata": pairs})
        assert answer.status_code == 201, answer.text
        assert answer.json()["completion_id"] == turn.id, pairs
    for pairs in ({"thread": "another-thread-id", "turn": "1"}, {"turn": "3"}, {"trun": "2"}):
        assert shape(await say(harness, {"metadata": pairs})) == (404, {"message", "type", "param", "code"})


async def test_a_retry_by_metadata_is_answered_although_the_pairs_point_elsewhere_by_now(harness: Harness) -> None:
    old = await harness.turn(created_at=1.0)
    await tag(harness, old.id, thread="t")
    first = await say(harness, {"metadata": {"thread": "t"}}, id="once")
    await tag(harness, (await harness.turn()).id, thread="t")
    again = await say(harness, {"metadata": {"thread": "t"}}, id="once")
    assert (again.status_code, again.json()) == (200, first.json())
    assert again.json()["completion_id"] == old.id


async def test_a_deleted_turn_is_like_one_that_never_was(harness: Harness) -> None:
    turn = await harness.turn(conversation_id="c", deleted_at=now())
    await tag(harness, turn.id, thread="t")
    for target in ({"completion_id": turn.id}, {"conversation_id": "c"}, {"metadata": {"thread": "t"}}):
        assert shape(await say(harness, target))[0] == 404
    assert (await harness.api.get("/v1/feedback", params={"completion_id": turn.id})).status_code == 404
    assert (await harness.api.get("/v1/feedback", params={"conversation_id": "c"})).status_code == 404


async def test_what_is_foreign_answers_byte_for_byte_like_what_is_unknown(harness: Harness) -> None:
    headers = await stranger(harness)
    turn = await harness.turn(conversation_id="c")
    await tag(harness, turn.id, thread="t")
    mine = (await harness.thumb(turn.id)).json()["id"]
    pairs = [
        (say(harness, {"completion_id": turn.id}, headers), say(harness, {"completion_id": "X"}, headers), turn.id),
        (say(harness, {"conversation_id": "c"}, headers), say(harness, {"conversation_id": "X"}, headers), "c"),
        (say(harness, {"metadata": {"thread": "t"}}, headers), say(harness, {"metadata": {"thread": "X"}}, headers), "t"),
        *(
            (harness.api.request(method, f"/v1/feedback/{mine}", headers=headers),
             harness.api.request(method, "/v1/feedback/X", headers=headers), mine)
            for method in ("GET", "DELETE")
        ),
    ]  # fmt: skip
    for foreign, unknown, name in pairs:
        one, other = await foreign, await unknown
        assert one.status_code == other.status_code == 404
        assert one.text == other.text.replace("X", name) if name != "t" else one.text == other.text
    assert len(await harness.all(Feedback)) == 1


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"completion_id": "a", "target": {"completion_id": "a"}},
        {"target": {}},
        {"target": {"completion_id": "a", "conversation_id": "c"}},
        {"target": {"conversation_id": "c", "choice_index": 0}},
        {"target": {"metadata": {}}},
        {"target": {"metadata": {f"k{number}": "v" for number in range(17)}}},
        {"target": {"metadata": {"k": 1}}},
        {"target": {"metadata": {"k" * 65: "v"}}},
        {"target": "a"},
        {"choice_index": 1, "target": {"completion_id": "a"}},
        {"completion_id": "a", "choice_index": -1},
        {"completion_id": "a", "choice_index": 128},
        {"completion_id": "a", "choice_index": "0"},
        {"completion_id": "a", "choice_index": True},
    ],
)
def test_a_target_that_is_none_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(BadRequest):
        kinds.read({"kind": "binary", "value": True, **fields})
