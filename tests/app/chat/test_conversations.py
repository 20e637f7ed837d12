"""Threads without ceremony: who follows whom, in which conversation, with which tokens; and a client's own retries."""

from typing import Any

import pytest

from app.chat import conversations
from app.models import Sample, SampleState, Turn
from tests.support.deployment import Harness
from tests.support.scripted_engine import ROLES, ScriptedEngine, rendered
from workers.feedback.curate import curate

Messages = list[dict[str, Any]]
HELLO = [{"role": "user", "content": "hello"}]


async def ask(harness: Harness, messages: Messages, headers: dict[str, str] | None = None, **fields: Any) -> Turn:
    body = {"model": "shop", "messages": messages, **fields}
    answer = await harness.api.post("/v1/chat/completions", json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    turn: Turn = await harness.get(Turn, answer.headers["x-completion-id"])
    assert answer.headers["x-conversation-id"] == turn.conversation_id
    return turn


def follow(messages: Messages, turn: Turn, text: str = "and tomorrow?") -> Messages:
    assert turn.reply is not None
    return [*messages, turn.reply, {"role": "user", "content": text}]


async def test_a_follow_up_is_found_by_its_messages_and_keeps_the_sampled_tokens(
    harness: Harness, scripted: ScriptedEngine
) -> None:
    first = await ask(harness, HELLO)
    assert first.parent_id is None and first.prefix_reuse is None and first.prompt_ids == rendered(HELLO)
    messages = follow(HELLO, first)
    second = await ask(harness, messages)
    assert (second.parent_id, second.conversation_id) == (first.id, first.conversation_id)
    assert second.prefix_reuse == "exact"
    before = [*first.prompt_ids, *first.output_ids]
    assert second.prompt_ids[: len(before)] == before
    assert second.prompt_ids[len(before) :] == [13, *rendered(messages[-1:])]
    third = await ask(harness, follow(messages, second))
    assert (third.parent_id, third.prefix_reuse) == (second.id, "exact")
    assert third.prompt_ids[: len(second.prompt_ids)] == second.prompt_ids


@pytest.mark.parametrize("stream", [False, True])
async def test_a_streamed_reply_is_followed_as_well(harness: Harness, scripted: ScriptedEngine, stream: bool) -> None:
    first = await ask(harness, HELLO, stream=stream)
    second = await ask(harness, follow(HELLO, first), stream=stream)
    assert (second.parent_id, second.prefix_reuse) == (first.id, "exact")


async def test_tool_calls_come_back_with_other_spaces_and_are_known_all_the_same(
    harness: Harness, scripted: ScriptedEngine
) -> None:
    scripted.tool_call = ("order_status", '{"order": "7"}')
    tools = [{"type": "function", "function": {"name": "order_status"}}]
    first = await ask(harness, HELLO, tools=tools)
    call = {"id": "call_1", "type": "function", "function": {"name": "order_status", "arguments": '{"order":"7"}'}}
    asked = {"role": "assistant", "content": None, "tool_calls": [call]}
    told = {"role": "tool", "tool_call_id": "call_1", "content": "ready"}
    scripted.tool_call = None
    second = await ask(harness, [*HELLO, asked, told], tools=tools)
    assert second.parent_id == first.id


async def test_two_strangers_who_said_the_same_do_not_share_a_thread(
    harness: Harness, scripted: ScriptedEngine
) -> None:
    anna, bert = await ask(harness, HELLO), await ask(harness, HELLO)
    assert anna.conversation_id != bert.conversation_id
    parents = {(await ask(harness, follow(HELLO, anna, text))).parent_id for text in ("monday?", "sunday?")}
    assert parents == {anna.id, bert.id}
    known = await ask(harness, HELLO, user="carl")
    assert (await ask(harness, follow(HELLO, known), user="carl")).parent_id == known.id
    assert (await ask(harness, follow(HELLO, known), user="dora")).parent_id is None


async def test_a_named_conversation_is_kept_and_bounds_the_search(harness: Harness, scripted: ScriptedEngine) -> None:
    first = await ask(harness, HELLO, metadata={"conversation_id": "ticket-7"})
    other = await ask(harness, HELLO, headers={"x-conversation-id": "ticket-8"})
    assert (first.conversation_id, other.conversation_id) == ("ticket-7", "ticket-8")
    second = await ask(harness, follow(HELLO, first), headers={"x-conversation-id": "ticket-7"})
    assert (second.parent_id, second.prefix_reuse) == (first.id, "exact")
    edited = [{"role": "user", "content": "something else"}]
    third = await ask(harness, edited, metadata={"conversation_id": "ticket-7"})
    assert third.parent_id == second.id and "do not go on" in third.prefix_reuse
    assert third.prompt_ids == rendered(edited)


async def test_where_tokens_cannot_be_kept_the_turn_says_why(harness: Harness, scripted: ScriptedEngine) -> None:
    cut = await ask(harness, HELLO, max_tokens=3)
    assert cut.finish_reason == "length"
    assert "ended early: length" in (await ask(harness, follow(HELLO, cut))).prefix_reuse
    scripted.say = "twice"
    stopped = await ask(harness, HELLO, stop=["and"])
    assert "stop string" in (await ask(harness, follow(HELLO, stopped))).prefix_reuse
    scripted.say = "thrice"
    changed = await ask(harness, HELLO)
    scripted.refuse = None
    assert changed.reply is not None
    ROLES["user"] += 10  # the template of a new deployment
    try:
        later = await ask(harness, follow(HELLO, changed))
    finally:
        ROLES["user"] -= 10
    assert "rendered differently" in later.prefix_reuse or "renders the earlier prompt" in later.prefix_reuse


def test_a_hash_stands_for_all_messages_before_it() -> None:
    one, two = conversations.hashes([*HELLO, {"role": "assistant", "content": "hi"}])
    assert conversations.hashes(HELLO) == [one]
    assert (
        conversations.hashes([{"role": "user", "content": "hell"}, {"role": "assistant", "content": "ohi"}])[1] != two
    )


async def test_a_clients_retry_makes_one_trainable_turn(harness: Harness, scripted: ScriptedEngine) -> None:
    first = await ask(harness, HELLO)
    second = await ask(harness, HELLO, headers={"x-stainless-retry-count": "1"})
    first = await harness.get(Turn, first.id)
    assert second.id in (first.exclusion_reason or "") and second.exclusion_reason is None
    other = await ask(harness, [{"role": "user", "content": "else"}], headers={"x-stainless-retry-count": "1"})
    assert other.exclusion_reason is None and (await harness.get(Turn, second.id)).exclusion_reason is None


async def test_a_retry_of_what_was_judged_leaves_the_judged_turn(harness: Harness, scripted: ScriptedEngine) -> None:
    first = await ask(harness, HELLO)
    await harness.thumb(first.id)
    await curate(harness.db, harness.settings)
    second = await ask(harness, HELLO, headers={"x-stainless-retry-count": "2"})
    assert first.id in (second.exclusion_reason or "") and (await harness.get(Turn, first.id)).exclusion_reason is None


async def test_a_retry_takes_the_place_of_no_more_than_it_repeats(harness: Harness, scripted: ScriptedEngine) -> None:
    others = [await ask(harness, HELLO) for _ in range(3)]
    followed = await ask(harness, HELLO)
    await ask(harness, follow(HELLO, followed))
    elsewhere = await ask(harness, HELLO, headers={"x-conversation-id": "elsewhere"})
    here = await ask(harness, HELLO, headers={"x-conversation-id": "here"})
    await ask(harness, HELLO, headers={"x-stainless-retry-count": "1", "x-conversation-id": "here"})
    kept = [await harness.get(Turn, turn.id) for turn in (*others, followed, elsewhere)]
    assert all(turn.exclusion_reason is None for turn in kept)
    assert "instead" in (await harness.get(Turn, here.id)).exclusion_reason


@pytest.mark.parametrize("count", ["²", "9" * 5000, "-1", "", "one"])
async def test_a_retry_count_that_is_no_number_counts_for_nothing(
    harness: Harness, scripted: ScriptedEngine, count: str
) -> None:
    body = {"model": "shop", "messages": HELLO}
    headers = {b"x-stainless-retry-count": count.encode("latin-1")}
    assert (await harness.api.post("/v1/chat/completions", json=body, headers=headers)).status_code == 200


async def test_the_longest_match_wins_over_newer_strangers(harness: Harness, scripted: ScriptedEngine) -> None:
    first = await ask(harness, HELLO)
    messages = follow(HELLO, first)
    second = await ask(harness, messages)
    for _ in range(12):
        await ask(harness, HELLO)
    third = await ask(harness, follow(messages, second))
    assert (third.parent_id, third.conversation_id) == (second.id, first.conversation_id)


async def test_where_calls_may_have_been_cut_the_tokens_are_not_kept(
    harness: Harness, scripted: ScriptedEngine
) -> None:
    scripted.tool_call, scripted.calls = ("order_status", "{}"), 2
    fields = {"tools": [{"type": "function", "function": {"name": "order_status"}}], "parallel_tool_calls": False}
    first = await ask(harness, HELLO, **fields)
    scripted.tool_call = None
    told = {"role": "tool", "tool_call_id": "call_1", "content": "ready"}
    second = await ask(harness, [*HELLO, first.reply or {}, told], **fields)
    assert second.parent_id == first.id and "more tools than were sent" in (second.prefix_reuse or "")


async def test_arguments_nested_beyond_reason_are_taken_as_they_are(harness: Harness, scripted: ScriptedEngine) -> None:
    function = {"name": "x", "arguments": "[" * 300 + "]" * 300}
    asked = {"role": "assistant", "tool_calls": [{"id": "c", "type": "function", "function": function}]}
    await ask(harness, [*HELLO, asked, {"role": "tool", "tool_call_id": "c", "content": "ready"}])


@pytest.mark.parametrize(
    ("value", "exclusion_reason"),
    [(no, "no consent to train") for no in ("false", "False", "no", "0", "")] + [("true", None)],
)
async def test_a_request_may_withhold_consent(
    harness: Harness, scripted: ScriptedEngine, value: str, exclusion_reason: str | None
) -> None:
    assert (await ask(harness, HELLO, metadata={"attune_train": value})).exclusion_reason == exclusion_reason


async def test_consent_can_be_withdrawn_by_a_new_label(harness: Harness, scripted: ScriptedEngine) -> None:
    turn = await ask(harness, HELLO)
    await harness.thumb(turn.id)
    await curate(harness.db, harness.settings)
    await harness.api.post(f"/v1/chat/completions/{turn.id}", json={"metadata": {"attune_train": "False"}})
    assert (await harness.get(Turn, turn.id)).exclusion_reason == "no consent to train"
    assert (await harness.get(Sample, turn.id)).state == SampleState.DROPPED


async def test_consent_that_is_withdrawn_counts_before_any_other_flaw(
    harness: Harness, scripted: ScriptedEngine
) -> None:
    turn = await ask(harness, HELLO, top_p=0.9)
    assert turn.exclusion_reason not in (None, "no consent to train")
    await harness.api.post(f"/v1/chat/completions/{turn.id}", json={"metadata": {"attune_train": "false"}})
    assert (await harness.get(Turn, turn.id)).exclusion_reason == "no consent to train"


async def test_a_request_cannot_give_the_consent_that_its_key_withholds(
    harness: Harness, scripted: ScriptedEngine
) -> None:
    made = (await harness.api.post("/v1/keys", json={"train": False, "scopes": ["chat"]})).json()
    headers = {"authorization": f"Bearer {made['key']}"}
    for metadata in ({}, {"attune_train": "true"}):
        assert (await ask(harness, HELLO, headers=headers, metadata=metadata)).exclusion_reason == "no consent to train"
