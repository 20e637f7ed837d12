"""Targets of feedback: a choice of a completion, a conversation, or the turn that matches metadata."""

from typing import Any

import httpx2
import pytest

from app.core.database import now
from app.models import Feedback
from tests.support.deployment import Harness
from tests.support.feedback_users import add_metadata, create_other_project_key, error_shape


async def send(
    harness: Harness, target: dict[str, Any] | None = None, headers: dict[str, str] | None = None, **fields: Any
) -> httpx2.Response:
    body = {"kind": "binary", "value": True, **({"target": target} if target is not None else {}), **fields}
    return await harness.api.post("/v1/feedback", json=body, headers=headers or {})


@pytest.mark.parametrize("in_target", [True, False])
async def test_choice_of_completion_is_a_turn(harness: Harness, in_target: bool) -> None:
    first = await harness.turn()
    second = await harness.turn(completion_id=first.id, choice_index=1)
    choice: dict[str, Any] = {"completion_id": first.id, "choice_index": 1}
    response = await (send(harness, choice) if in_target else send(harness, **choice))
    assert response.status_code == 201, response.text
    assert (response.json()["completion_id"], response.json()["choice_index"]) == (first.id, 1)
    [row] = await harness.all(Feedback)
    assert row.turn_id == second.id
    assert error_shape(await send(harness, completion_id=first.id, choice_index=2))[0] == 404


async def test_feedback_about_conversation(harness: Harness) -> None:
    await harness.turn(conversation_id="c-1")
    response = await send(harness, {"conversation_id": "c-1"})
    assert response.status_code == 201, response.text
    assert (response.json()["conversation_id"], response.json()["completion_id"]) == ("c-1", None)
    [row] = await harness.all(Feedback)
    assert (row.turn_id, row.target, row.processed) == (None, "conversation:c-1", False)
    assert error_shape(await send(harness, {"conversation_id": "c-2"}))[0] == 404


async def test_metadata_target_matches_all_pairs_and_newest_turn(harness: Harness) -> None:
    old, new, other = [await harness.turn(created_at=float(second)) for second in (1, 2, 3)]
    await add_metadata(harness, old.id, thread="a-long-thread-id", turn="1")
    await add_metadata(harness, new.id, thread="a-long-thread-id", turn="2")
    await add_metadata(harness, other.id, thread="another-thread-id", turn="2")
    for pairs, turn in [
        ({"thread": "a-long-thread-id"}, new),
        ({"thread": "a-long-thread-id", "turn": "1"}, old),
        ({"turn": "2"}, other),
        ({"turn": "2", "thread": "a-long-thread-id"}, new),
    ]:
        response = await send(harness, {"metadata": pairs})
        assert response.status_code == 201, response.text
        assert response.json()["completion_id"] == turn.id, pairs
    for pairs in ({"thread": "another-thread-id", "turn": "1"}, {"turn": "3"}, {"trun": "2"}):
        assert error_shape(await send(harness, {"metadata": pairs})) == (404, {"message", "type", "param", "code"})


async def test_retry_by_metadata_is_replayed_after_newer_turn(harness: Harness) -> None:
    old = await harness.turn(created_at=1.0)
    await add_metadata(harness, old.id, thread="t")
    first = await send(harness, {"metadata": {"thread": "t"}}, id="once")
    await add_metadata(harness, (await harness.turn()).id, thread="t")
    again = await send(harness, {"metadata": {"thread": "t"}}, id="once")
    assert (again.status_code, again.json()) == (200, first.json())
    assert again.json()["completion_id"] == old.id


async def test_deleted_turn_is_not_found(harness: Harness) -> None:
    turn = await harness.turn(conversation_id="c", deleted_at=now())
    await add_metadata(harness, turn.id, thread="t")
    for target in ({"completion_id": turn.id}, {"conversation_id": "c"}, {"metadata": {"thread": "t"}}):
        assert error_shape(await send(harness, target))[0] == 404
    assert (await harness.api.get("/v1/feedback", params={"completion_id": turn.id})).status_code == 404
    assert (await harness.api.get("/v1/feedback", params={"conversation_id": "c"})).status_code == 404


async def test_foreign_target_is_indistinguishable_from_unknown(harness: Harness) -> None:
    headers = await create_other_project_key(harness)
    turn = await harness.turn(conversation_id="c")
    await add_metadata(harness, turn.id, thread="t")
    feedback_id = (await harness.vote(turn.id)).json()["id"]
    pairs = [
        (send(harness, {"completion_id": turn.id}, headers), send(harness, {"completion_id": "X"}, headers), turn.id),
        (send(harness, {"conversation_id": "c"}, headers), send(harness, {"conversation_id": "X"}, headers), "c"),
        (
            send(harness, {"metadata": {"thread": "t"}}, headers),
            send(harness, {"metadata": {"thread": "X"}}, headers),
            "t",
        ),
        *(
            (harness.api.request(method, f"/v1/feedback/{feedback_id}", headers=headers),
             harness.api.request(method, "/v1/feedback/X", headers=headers), feedback_id)
            for method in ("GET", "DELETE")
        ),
    ]  # fmt: skip
    for foreign, unknown, name in pairs:
        foreign_response, unknown_response = await foreign, await unknown
        assert foreign_response.status_code == unknown_response.status_code == 404
        assert (
            foreign_response.text == unknown_response.text.replace("X", name)
            if name != "t"
            else foreign_response.text == unknown_response.text
        )
    assert len(await harness.all(Feedback)) == 1
