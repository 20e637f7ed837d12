"""Threads without ceremony: who follows whom, in which conversation, with which tokens; and a client's own retries."""

from typing import Any

import pytest

from app.chat import conversations
from app.models import Sample, SampleState, Turn
from tests.support.deployment import Ring
from tests.support.scripted_engine import ROLES, ScriptedEngine, rendered
from workers.feedback.curate import curate

Messages = list[dict[str, Any]]
HELLO = [{"role": "user", "content": "hello"}]


async def ask(ring: Ring, messages: Messages, headers: dict[str, str] | None = None, **fields: Any) -> Turn:
    body = {"model": "shop", "messages": messages, **fields}
    answer = await ring.api.post("/v1/chat/completions", json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    turn: Turn = await ring.get(Turn, answer.headers["x-completion-id"])
    assert answer.headers["x-conversation-id"] == turn.conversation_id
    return turn


def follow(messages: Messages, turn: Turn, text: str = "and tomorrow?") -> Messages:
    assert turn.reply is not None
    return [*messages, turn.reply, {"role": "user", "content": text}]


async def test_a_follow_up_is_found_by_its_messages_and_keeps_the_sampled_tokens(
    ring: Ring, scripted: ScriptedEngine
) -> None:
    first = await ask(ring, HELLO)
    assert first.parent_id is None and first.continuity is None and first.prompt_ids == rendered(HELLO)
    messages = follow(HELLO, first)
    second = await ask(ring, messages)
    assert (second.parent_id, second.conversation_id) == (first.id, first.conversation_id)
    assert second.continuity == "exact"
    before = [*first.prompt_ids, *first.output_ids]
    assert second.prompt_ids[: len(before)] == before
    assert second.prompt_ids[len(before) :] == [13, *rendered(messages[-1:])]
    third = await ask(ring, follow(messages, second))
    assert (third.parent_id, third.continuity) == (second.id, "exact")
    assert third.prompt_ids[: len(second.prompt_ids)] == second.prompt_ids


@pytest.mark.parametrize("stream", [False, True])
async def test_a_streamed_reply_is_followed_as_well(ring: Ring, scripted: ScriptedEngine, stream: bool) -> None:
    first = await ask(ring, HELLO, stream=stream)
    second = await ask(ring, follow(HELLO, first), stream=stream)
    assert (second.parent_id, second.continuity) == (first.id, "exact")


async def test_tool_calls_come_back_with_other_spaces_and_are_known_all_the_same(
    ring: Ring, scripted: ScriptedEngine
) -> None:
    scripted.tool_call = ("order_status", '{"order": "7"}')
    tools = [{"type": "function", "function": {"name": "order_status"}}]
    first = await ask(ring, HELLO, tools=tools)
    call = {"id": "call_1", "type": "function", "function": {"name": "order_status", "arguments": '{"order":"7"}'}}
    asked = {"role": "assistant", "content": None, "tool_calls": [call]}
    told = {"role": "tool", "tool_call_id": "call_1", "content": "ready"}
    scripted.tool_call = None
    second = await ask(ring, [*HELLO, asked, told], tools=tools)
    assert second.parent_id == first.id


async def test_two_strangers_who_said_the_same_do_not_share_a_thread(ring: Ring, scripted: ScriptedEngine) -> None:
    anna, bert = await ask(ring, HELLO), await ask(ring, HELLO)
    assert anna.conversation_id != bert.conversation_id
    parents = {(await ask(ring, follow(HELLO, anna, text))).parent_id for text in ("monday?", "sunday?")}
    assert parents == {anna.id, bert.id}
    known = await ask(ring, HELLO, user="carl")
    assert (await ask(ring, follow(HELLO, known), user="carl")).parent_id == known.id
    assert (await ask(ring, follow(HELLO, known), user="dora")).parent_id is None


async def test_a_named_conversation_is_kept_and_bounds_the_search(ring: Ring, scripted: ScriptedEngine) -> None:
    first = await ask(ring, HELLO, metadata={"conversation_id": "ticket-7"})
    other = await ask(ring, HELLO, headers={"x-conversation-id": "ticket-8"})
    assert (first.conversation_id, other.conversation_id) == ("ticket-7", "ticket-8")
    second = await ask(ring, follow(HELLO, first), headers={"x-conversation-id": "ticket-7"})
    assert (second.parent_id, second.continuity) == (first.id, "exact")
    edited = [{"role": "user", "content": "something else"}]
    third = await ask(ring, edited, metadata={"conversation_id": "ticket-7"})
    assert third.parent_id == second.id and "do not go on" in third.continuity
    assert third.prompt_ids == rendered(edited)


async def test_where_tokens_cannot_be_kept_the_turn_says_why(ring: Ring, scripted: ScriptedEngine) -> None:
    cut = await ask(ring, HELLO, max_tokens=3)
    assert cut.finish_reason == "length"
    assert "ended early: length" in (await ask(ring, follow(HELLO, cut))).continuity
    scripted.say = "twice"
    stopped = await ask(ring, HELLO, stop=["and"])
    assert "stop string" in (await ask(ring, follow(HELLO, stopped))).continuity
    scripted.say = "thrice"
    changed = await ask(ring, HELLO)
    scripted.refuse = None
    assert changed.reply is not None
    ROLES["user"] += 10  # the template of a new deployment
    try:
        later = await ask(ring, follow(HELLO, changed))
    finally:
        ROLES["user"] -= 10
    assert "rendered differently" in later.continuity or "renders the earlier prompt" in later.continuity


def test_a_hash_stands_for_all_messages_before_it() -> None:
    one, two = conversations.hashes([*HELLO, {"role": "assistant", "content": "hi"}])
    assert conversations.hashes(HELLO) == [one]
    assert (
        conversations.hashes([{"role": "user", "content": "hell"}, {"role": "assistant", "content": "ohi"}])[1] != two
    )


async def test_a_clients_retry_makes_one_trainable_turn(ring: Ring, scripted: ScriptedEngine) -> None:
    first = await ask(ring, HELLO)
    second = await ask(ring, HELLO, headers={"x-stainless-retry-count": "1"})
    first = await ring.get(Turn, first.id)
    assert second.id in (first.flaw or "") and second.flaw is None
    other = await ask(ring, [{"role": "user", "content": "else"}], headers={"x-stainless-retry-count": "1"})
    assert other.flaw is None and (await ring.get(Turn, second.id)).flaw is None


async def test_a_retry_of_what_was_judged_leaves_the_judged_turn(ring: Ring, scripted: ScriptedEngine) -> None:
    first = await ask(ring, HELLO)
    await ring.thumb(first.id)
    await curate(ring.db, ring.settings)
    second = await ask(ring, HELLO, headers={"x-stainless-retry-count": "2"})
    assert first.id in (second.flaw or "") and (await ring.get(Turn, first.id)).flaw is None


async def test_a_retry_takes_the_place_of_no_more_than_it_repeats(ring: Ring, scripted: ScriptedEngine) -> None:
    others = [await ask(ring, HELLO) for _ in range(3)]
    followed = await ask(ring, HELLO)
    await ask(ring, follow(HELLO, followed))
    elsewhere = await ask(ring, HELLO, headers={"x-conversation-id": "elsewhere"})
    here = await ask(ring, HELLO, headers={"x-conversation-id": "here"})
    await ask(ring, HELLO, headers={"x-stainless-retry-count": "1", "x-conversation-id": "here"})
    kept = [await ring.get(Turn, turn.id) for turn in (*others, followed, elsewhere)]
    assert all(turn.flaw is None for turn in kept)
    assert "instead" in (await ring.get(Turn, here.id)).flaw


@pytest.mark.parametrize("count", ["²", "9" * 5000, "-1", "", "one"])
async def test_a_retry_count_that_is_no_number_counts_for_nothing(
    ring: Ring, scripted: ScriptedEngine, count: str
) -> None:
    body = {"model": "shop", "messages": HELLO}
    headers = {b"x-stainless-retry-count": count.encode("latin-1")}
    assert (await ring.api.post("/v1/chat/completions", json=body, headers=headers)).status_code == 200


async def test_the_longest_match_wins_over_newer_strangers(ring: Ring, scripted: ScriptedEngine) -> None:
    first = await ask(ring, HELLO)
    messages = follow(HELLO, first)
    second = await ask(ring, messages)
    for _ in range(12):
        await ask(ring, HELLO)
    third = await ask(ring, follow(messages, second))
    assert (third.parent_id, third.conversation_id) == (second.id, first.conversation_id)


async def test_where_calls_may_have_been_cut_the_tokens_are_not_kept(ring: Ring, scripted: ScriptedEngine) -> None:
    scripted.tool_call, scripted.calls = ("order_status", "{}"), 2
    fields = {"tools": [{"type": "function", "function": {"name": "order_status"}}], "parallel_tool_calls": False}
    first = await ask(ring, HELLO, **fields)
    scripted.tool_call = None
    told = {"role": "tool", "tool_call_id": "call_1", "content": "ready"}
    second = await ask(ring, [*HELLO, first.reply or {}, told], **fields)
    assert second.parent_id == first.id and "more tools than were sent" in (second.continuity or "")


async def test_arguments_nested_beyond_reason_are_taken_as_they_are(ring: Ring, scripted: ScriptedEngine) -> None:
    function = {"name": "x", "arguments": "[" * 300 + "]" * 300}
    asked = {"role": "assistant", "tool_calls": [{"id": "c", "type": "function", "function": function}]}
    await ask(ring, [*HELLO, asked, {"role": "tool", "tool_call_id": "c", "content": "ready"}])


@pytest.mark.parametrize(
    ("value", "flaw"),
    [(no, "no consent to train") for no in ("false", "False", "no", "0", "")] + [("true", None)],
)
async def test_a_request_may_withhold_consent(
    ring: Ring, scripted: ScriptedEngine, value: str, flaw: str | None
) -> None:
    assert (await ask(ring, HELLO, metadata={"attune_train": value})).flaw == flaw


async def test_consent_can_be_withdrawn_by_a_new_label(ring: Ring, scripted: ScriptedEngine) -> None:
    turn = await ask(ring, HELLO)
    await ring.thumb(turn.id)
    await curate(ring.db, ring.settings)
    await ring.api.post(f"/v1/chat/completions/{turn.id}", json={"metadata": {"attune_train": "False"}})
    assert (await ring.get(Turn, turn.id)).flaw == "no consent to train"
    assert (await ring.get(Sample, turn.id)).state == SampleState.DROPPED


async def test_consent_that_is_withdrawn_counts_before_any_other_flaw(ring: Ring, scripted: ScriptedEngine) -> None:
    turn = await ask(ring, HELLO, top_p=0.9)
    assert turn.flaw not in (None, "no consent to train")
    await ring.api.post(f"/v1/chat/completions/{turn.id}", json={"metadata": {"attune_train": "false"}})
    assert (await ring.get(Turn, turn.id)).flaw == "no consent to train"


async def test_a_request_cannot_give_the_consent_that_its_key_withholds(ring: Ring, scripted: ScriptedEngine) -> None:
    made = (await ring.api.post("/v1/keys", json={"train": False, "scopes": ["chat"]})).json()
    headers = {"authorization": f"Bearer {made['key']}"}
    for metadata in ({}, {"attune_train": "true"}):
        assert (await ask(ring, HELLO, headers=headers, metadata=metadata)).flaw == "no consent to train"
