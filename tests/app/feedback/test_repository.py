"""Targets of feedback: a choice of a completion, a conversation, or the turn that matches metadata."""

from base64 import b64encode
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


async def test_turn_of_conversation_is_found_by_its_number(harness: Harness) -> None:
    """Two replies to one request share a number; the number of a later turn does not change with them."""
    chat: dict[str, Any] = {"conversation_id": "c-1"}
    first = await harness.turn(created_at=1.0, **chat)
    replaced = await harness.turn(created_at=2.0, parent_id=first.id, **chat)
    after_replaced = await harness.turn(created_at=3.0, parent_id=replaced.id, **chat)
    second = await harness.turn(created_at=4.0, parent_id=first.id, **chat)
    other_choice = await harness.turn(
        created_at=4.0, completion_id=second.id, choice_index=1, parent_id=first.id, **chat
    )
    await harness.turn(created_at=5.0, parent_id=second.id, **chat, deleted_at=6.0)
    await harness.turn(created_at=7.0, parent_id=second.id, **chat, origin="group_sample")
    await harness.turn(created_at=8.0, conversation_id="c-2", parent_id=second.id)
    items = [
        {"kind": "binary", "value": 1, "target": {**chat, "turn": turn, **more}}
        for turn, more in ((1, {}), (2, {}), (2, {"choice_index": 1}), (3, {}), (-1, {}), (4, {}))
    ]
    items.append({"kind": "binary", "value": 1, "target": {"conversation_id": "c-3", "turn": 1}})
    response = await harness.api.post("/v1/feedback/batch", json={"items": items})
    *recorded, unknown, foreign = response.json()["data"]
    by_id = {row.id: row.turn_id for row in await harness.all(Feedback)}
    found = [by_id[result["feedback"]["id"]] for result in recorded]
    assert found == [first.id, second.id, other_choice.id, after_replaced.id, second.id]
    assert (unknown["status"], foreign["status"]) == (404, 404)
    assert unknown["error"]["message"] == "There is no conversation 'c-1' with a turn 4."
    single = await send(harness, {**chat, "turn": 1})
    assert (single.status_code, single.json()["completion_id"]) == (201, first.id)


async def test_ids_of_request_response_and_message_name_the_completion(harness: Harness) -> None:
    turn = await harness.turn()
    prefixes = ("req-", "resp_", "msg_")
    request_id, response_id, message_id = (turn.id.replace("chatcmpl-", prefix) for prefix in prefixes)
    named: list[dict[str, Any]] = [
        {"request_id": request_id},
        {"completion_id": request_id},
        {"completion_id": response_id},
        {"completion_id": message_id},
        {"completion_id": litellm_id(response_id)},
    ]
    for fields in named:
        response = await send(harness, **fields)
        assert (response.status_code, response.json()["completion_id"]) == (201, turn.id), response.text
    listed = await harness.api.get("/v1/feedback", params={"completion_id": request_id})
    assert len(listed.json()["data"]) == len(named)
    assert (await harness.api.get(f"/v1/chat/completions/{request_id}")).json()["id"] == turn.id


def litellm_id(response_id: str) -> str:
    """Return the id that LiteLLM gives a response. The third-party client `litellm-responses` has real ones."""
    text = f"litellm:custom_llm_provider:openai;model_id:None;response_id:{response_id}"
    return "resp_" + b64encode(text.encode()).decode()


@pytest.mark.parametrize(
    "id",
    ["resp_", "resp_===", "resp_é", "resp_" + b64encode(b"\xff").decode(), "resp_" + b64encode(b"litellm:").decode()],
)
async def test_other_ids_of_responses_are_not_found(harness: Harness, id: str) -> None:
    response = await send(harness, completion_id=id)
    assert response.status_code == 404 and id.removeprefix("resp_") in response.json()["error"]["message"]


async def test_answer_says_whether_the_feedback_will_count(harness: Harness) -> None:
    good, greedy = await harness.turn(conversation_id="c-1"), await harness.turn(exclusion_reason="greedy decoding")
    answers: list[tuple[dict[str, Any], bool | None, str | None]] = [
        ({"completion_id": good.id}, True, None),
        ({"completion_id": greedy.id}, False, "greedy decoding"),
        ({"completion_id": good.id, "kind": "comment", "value": "ok"}, False, "a comment gives no reward"),
        ({"completion_id": good.id, "kind": "categorical", "value": "slow"}, None, None),
        ({"kind": "comparison", "value": [good.id, greedy.id]}, True, None),
        ({"target": {"conversation_id": "c-1"}}, None, None),
    ]
    items = [
        {"kind": "binary", "value": 1, **fields, "id": f"k{number}"} for number, (fields, *_) in enumerate(answers)
    ]
    for status in (201, 200):  # also when it is repeated
        results = (await harness.api.post("/v1/feedback/batch", json={"items": items})).json()["data"]
        for result, (fields, *expected) in zip(results, answers, strict=True):
            feedback = result["feedback"]
            assert (result["status"], [feedback["trainable"], feedback["exclusion_reason"]]) == (status, expected), (
                fields
            )


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
    assert (again.status_code, again.json()) == (200, first.json() | {"effective": True, "withdrawn": False})
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
