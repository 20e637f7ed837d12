"""Conversations: parent turns, prefix reuse, client retries and consent."""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from app.chat import conversations
from app.models import Sample, SampleState, Turn
from tests.support.deployment import Harness
from tests.support.scripted_engine import ROLES, ScriptedEngine, render_prompt
from workers.curate import curate

Messages = Sequence[Mapping[str, Any]]
HELLO = [{"role": "user", "content": "hello"}]


async def ask(harness: Harness, messages: Messages, headers: dict[str, str] | None = None, **fields: Any) -> Turn:
    body = {"model": "shop", "messages": messages, **fields}
    response = await harness.api.post("/v1/chat/completions", json=body, headers=headers)
    assert response.status_code == 200, response.text
    turn: Turn = await harness.get(Turn, response.headers["x-completion-id"])
    assert response.headers["x-conversation-id"] == turn.conversation_id
    return turn


def follow(messages: Messages, turn: Turn, text: str = "and tomorrow?") -> Messages:
    assert turn.reply is not None
    return [*messages, turn.reply, {"role": "user", "content": text}]


async def all_ids(harness: Harness, turn: Turn) -> list[int]:
    return [*await harness.prompt_ids(turn.id), *(turn.output_ids or ())]


async def test_follow_up_is_found_by_messages_and_reuses_sampled_tokens(
    harness: Harness, scripted: ScriptedEngine
) -> None:
    first = await ask(harness, HELLO)
    assert first.parent_id is None and first.prefix_reuse is None and first.own_prompt_ids == render_prompt(HELLO)
    messages = follow(HELLO, first)
    second = await ask(harness, messages)
    assert (second.parent_id, second.conversation_id) == (first.id, first.conversation_id)
    assert second.prefix_reuse == "exact"
    first_ids, second_ids = await all_ids(harness, first), await all_ids(harness, second)
    assert second_ids[: len(first_ids)] == first_ids
    assert await harness.prompt_ids(second.id) == [*first_ids, 13, *render_prompt(messages[-1:])]
    third = await ask(harness, follow(messages, second))
    assert (third.parent_id, third.prefix_reuse) == (second.id, "exact")
    assert (await all_ids(harness, third))[: len(second_ids)] == second_ids


@pytest.mark.parametrize("stream", [False, True])
async def test_follow_up_to_streamed_reply_reuses_tokens(
    harness: Harness, scripted: ScriptedEngine, stream: bool
) -> None:
    first = await ask(harness, HELLO, stream=stream)
    second = await ask(harness, follow(HELLO, first), stream=stream)
    assert (second.parent_id, second.prefix_reuse) == (first.id, "exact")


async def test_tool_calls_match_despite_other_white_space(harness: Harness, scripted: ScriptedEngine) -> None:
    scripted.tool_call = ("order_status", '{"order": "7"}')
    tools = [{"type": "function", "function": {"name": "order_status"}}]
    first = await ask(harness, HELLO, tools=tools)
    call = {"id": "call_1", "type": "function", "function": {"name": "order_status", "arguments": '{"order":"7"}'}}
    tool_call_message = {"role": "assistant", "content": None, "tool_calls": [call]}
    tool_message = {"role": "tool", "tool_call_id": "call_1", "content": "ready"}
    scripted.tool_call = None
    second = await ask(harness, [*HELLO, tool_call_message, tool_message], tools=tools)
    assert second.parent_id == first.id


async def test_equal_messages_of_two_clients_are_separate_conversations(
    harness: Harness, scripted: ScriptedEngine
) -> None:
    anna, bert = await ask(harness, HELLO), await ask(harness, HELLO)
    assert anna.conversation_id != bert.conversation_id
    parents = {(await ask(harness, follow(HELLO, anna, text))).parent_id for text in ("monday?", "sunday?")}
    assert parents == {anna.id, bert.id}
    first_of_carl = await ask(harness, HELLO, user="carl")
    assert (await ask(harness, follow(HELLO, first_of_carl), user="carl")).parent_id == first_of_carl.id
    assert (await ask(harness, follow(HELLO, first_of_carl), user="dora")).parent_id is None


async def test_named_conversation_limits_parent_search(harness: Harness, scripted: ScriptedEngine) -> None:
    first = await ask(harness, HELLO, metadata={"conversation_id": "ticket-7"})
    other = await ask(harness, HELLO, headers={"x-conversation-id": "ticket-8"})
    assert (first.conversation_id, other.conversation_id) == ("ticket-7", "ticket-8")
    second = await ask(harness, follow(HELLO, first), headers={"x-conversation-id": "ticket-7"})
    assert (second.parent_id, second.prefix_reuse) == (first.id, "exact")
    edited = [{"role": "user", "content": "something else"}]
    third = await ask(harness, edited, metadata={"conversation_id": "ticket-7"})
    assert third.parent_id == second.id and "do not continue" in (third.prefix_reuse or "")
    assert await harness.prompt_ids(third.id) == render_prompt(edited)


async def test_refused_request_is_not_continued_and_no_target(harness: Harness, scripted: ScriptedEngine) -> None:
    metadata = {"conversation_id": "ticket-7", "message": "m-1"}
    first = await ask(harness, HELLO, metadata=metadata)
    scripted.refuse_status = 400
    body = {"model": "shop", "messages": follow(HELLO, first), "max_tokens": 8, "metadata": metadata}
    refused = await harness.api.post("/v1/chat/completions", json=body)
    assert refused.status_code == 400
    for target in (
        {"metadata": {"message": "m-1"}},
        {"conversation_id": "ticket-7", "turn": -1},
        {"conversation_id": "ticket-7", "turn": 1},
    ):
        vote = await harness.api.post("/v1/feedback", json={"kind": "binary", "value": True, "target": target})
        assert (vote.status_code, vote.json()["completion_id"]) == (201, first.id)
    number_two = {"kind": "binary", "value": True, "target": {"conversation_id": "ticket-7", "turn": 2}}
    assert (await harness.api.post("/v1/feedback", json=number_two)).status_code == 404
    scripted.refuse_status = None
    third = await ask(harness, [{"role": "user", "content": "anew"}], metadata=metadata)
    assert third.parent_id == first.id


async def test_turn_records_why_tokens_were_not_reused(harness: Harness, scripted: ScriptedEngine) -> None:
    truncated = await ask(harness, HELLO, max_tokens=3)
    assert truncated.finish_reason == "length"
    after_truncated = await ask(harness, follow(HELLO, truncated))
    assert "ended early: length" in (after_truncated.prefix_reuse or "")
    scripted.reply_text = "twice"
    stopped = await ask(harness, HELLO, stop=["and"])
    after_stopped = await ask(harness, follow(HELLO, stopped))
    assert "stop string" in (after_stopped.prefix_reuse or "")
    scripted.reply_text = "thrice"
    recorded = await ask(harness, HELLO)
    scripted.refuse_status = None
    assert recorded.reply is not None
    ROLES["user"] += 10  # the template of a new deployment
    try:
        later = await ask(harness, follow(HELLO, recorded))
    finally:
        ROLES["user"] -= 10
    reason = later.prefix_reuse or ""
    assert "rendered differently" in reason or "renders the parent's prompt" in reason


def test_prefix_hash_covers_all_earlier_messages() -> None:
    hash_of_first, hash_of_second = conversations.prefix_hashes([*HELLO, {"role": "assistant", "content": "hi"}])
    assert conversations.prefix_hashes(HELLO) == [hash_of_first]
    assert (
        conversations.prefix_hashes([{"role": "user", "content": "hell"}, {"role": "assistant", "content": "ohi"}])[1]
        != hash_of_second
    )


async def test_client_retry_leaves_one_trainable_turn(harness: Harness, scripted: ScriptedEngine) -> None:
    first = await ask(harness, HELLO)
    second = await ask(harness, HELLO, headers={"x-stainless-retry-count": "1"})
    first = await harness.get(Turn, first.id)
    assert second.id in (first.exclusion_reason or "") and second.exclusion_reason is None
    other = await ask(harness, [{"role": "user", "content": "else"}], headers={"x-stainless-retry-count": "1"})
    assert other.exclusion_reason is None and (await harness.get(Turn, second.id)).exclusion_reason is None


async def test_retry_of_sampled_turn_keeps_the_sampled_turn(harness: Harness, scripted: ScriptedEngine) -> None:
    first = await ask(harness, HELLO)
    await harness.vote(first.id)
    await curate(harness.db, harness.settings)
    second = await ask(harness, HELLO, headers={"x-stainless-retry-count": "2"})
    assert first.id in (second.exclusion_reason or "") and (await harness.get(Turn, first.id)).exclusion_reason is None


async def test_retry_replaces_only_repeated_turns(harness: Harness, scripted: ScriptedEngine) -> None:
    others = [await ask(harness, HELLO) for _ in range(3)]
    followed = await ask(harness, HELLO)
    await ask(harness, follow(HELLO, followed))
    elsewhere = await ask(harness, HELLO, headers={"x-conversation-id": "elsewhere"})
    here = await ask(harness, HELLO, headers={"x-conversation-id": "here"})
    await ask(harness, HELLO, headers={"x-stainless-retry-count": "1", "x-conversation-id": "here"})
    stored_turns = [await harness.get(Turn, turn.id) for turn in (*others, followed, elsewhere)]
    assert all(turn.exclusion_reason is None for turn in stored_turns)
    assert "instead" in (await harness.get(Turn, here.id)).exclusion_reason


@pytest.mark.parametrize("count", ["²", "9" * 5000, "-1", "", "one"])
async def test_invalid_retry_count_is_ignored(harness: Harness, scripted: ScriptedEngine, count: str) -> None:
    body = {"model": "shop", "messages": HELLO}
    headers = {b"x-stainless-retry-count": count.encode("latin-1")}
    assert (await harness.api.post("/v1/chat/completions", json=body, headers=headers)).status_code == 200


async def test_longest_match_wins_over_newer_turns(harness: Harness, scripted: ScriptedEngine) -> None:
    first = await ask(harness, HELLO)
    messages = follow(HELLO, first)
    second = await ask(harness, messages)
    for _ in range(12):
        await ask(harness, HELLO)
    third = await ask(harness, follow(messages, second))
    assert (third.parent_id, third.conversation_id) == (second.id, first.conversation_id)


async def test_tokens_are_not_reused_if_tool_calls_may_be_omitted(harness: Harness, scripted: ScriptedEngine) -> None:
    scripted.tool_call, scripted.num_tool_calls = ("order_status", "{}"), 2
    fields: dict[str, Any] = {
        "tools": [{"type": "function", "function": {"name": "order_status"}}],
        "parallel_tool_calls": False,
    }
    first = await ask(harness, HELLO, **fields)
    scripted.tool_call = None
    tool_message = {"role": "tool", "tool_call_id": "call_1", "content": "ready"}
    second = await ask(harness, [*HELLO, first.reply or {}, tool_message], **fields)
    assert second.parent_id == first.id and "more tool calls than the client received" in (second.prefix_reuse or "")


async def test_deeply_nested_arguments_are_compared_as_text(harness: Harness, scripted: ScriptedEngine) -> None:
    function = {"name": "x", "arguments": "[" * 300 + "]" * 300}
    tool_call_message = {"role": "assistant", "tool_calls": [{"id": "c", "type": "function", "function": function}]}
    await ask(harness, [*HELLO, tool_call_message, {"role": "tool", "tool_call_id": "c", "content": "ready"}])


@pytest.mark.parametrize(
    ("value", "exclusion_reason"),
    [(no, "no consent to train") for no in ("false", "False", "no", "0", "")] + [("true", None)],
)
async def test_request_can_withhold_consent(
    harness: Harness, scripted: ScriptedEngine, value: str, exclusion_reason: str | None
) -> None:
    assert (await ask(harness, HELLO, metadata={"attune_train": value})).exclusion_reason == exclusion_reason


async def test_consent_can_be_withdrawn_by_metadata_update(harness: Harness, scripted: ScriptedEngine) -> None:
    turn = await ask(harness, HELLO)
    await harness.vote(turn.id)
    await curate(harness.db, harness.settings)
    await harness.api.post(f"/v1/chat/completions/{turn.id}", json={"metadata": {"attune_train": "False"}})
    assert (await harness.get(Turn, turn.id)).exclusion_reason == "no consent to train"
    assert (await harness.get(Sample, turn.id)).state == SampleState.DROPPED


async def test_withdrawn_consent_replaces_other_exclusion_reasons(harness: Harness, scripted: ScriptedEngine) -> None:
    turn = await ask(harness, HELLO, top_p=0.9)
    assert turn.exclusion_reason not in (None, "no consent to train")
    await harness.api.post(f"/v1/chat/completions/{turn.id}", json={"metadata": {"attune_train": "false"}})
    assert (await harness.get(Turn, turn.id)).exclusion_reason == "no consent to train"


async def test_request_cannot_grant_consent_withheld_by_its_key(harness: Harness, scripted: ScriptedEngine) -> None:
    new_key = (await harness.api.post("/v1/keys", json={"train": False, "scopes": ["chat"]})).json()
    headers = {"authorization": f"Bearer {new_key['key']}"}
    for metadata in ({}, {"attune_train": "true"}):
        assert (await ask(harness, HELLO, headers=headers, metadata=metadata)).exclusion_reason == "no consent to train"


async def test_refusal_is_the_text_of_a_reply_without_content(harness: Harness, scripted: ScriptedEngine) -> None:
    refused = {"role": "assistant", "content": None, "refusal": "I can't help with that."}
    turn = await ask(harness, [*HELLO, refused, *HELLO])
    assert (await harness.messages(turn.id))[1] == {"role": "assistant", "content": "I can't help with that."}
    turn = await ask(harness, [*HELLO, {**refused, "content": "But I can help with this."}, *HELLO])
    assert (await harness.messages(turn.id))[1]["content"] == "But I can help with this."


@pytest.mark.parametrize("sent_back", ['{"order": ', None])
async def test_cut_call_continues_its_conversation(
    harness: Harness, scripted: ScriptedEngine, sent_back: str | None
) -> None:
    """Null stands for the empty text."""
    scripted.tool_call = ("order_status", sent_back or "")
    tools = [{"type": "function", "function": {"name": "order_status"}}]
    first = await ask(harness, HELLO, tools=tools)
    call = {"id": "call_1", "type": "function", "function": {"name": "order_status", "arguments": sent_back}}
    result = {"role": "tool", "tool_call_id": "call_1", "content": "The call was cut."}
    scripted.tool_call = None
    second = await ask(harness, [*HELLO, {"role": "assistant", "tool_calls": [call]}, result], tools=tools)
    assert second.parent_id == first.id
    [sent] = scripted.requests[-1]["messages"][1]["tool_calls"]
    assert sent["function"]["arguments"] == "{}"
    assert (await harness.messages(second.id))[1]["tool_calls"][0]["function"]["arguments"] == (sent_back or "")
