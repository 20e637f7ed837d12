"""Replies of a scripted engine: what is relayed, what is captured, and what breaks."""

import asyncio
import math
from collections.abc import Callable

import pytest

from app.inference.client import EngineClient
from app.inference.errors import AdapterMissing, EngineRefused, EngineUnavailable
from tests.support.scripted_engine import Reply


async def streamed(client, call):
    chunks = []
    async with client.stream(call) as reply:
        async for chunk in reply:
            chunks.append(chunk)
    return chunks, reply.capture


async def whole(client, call):
    return [], (await client.complete(call)).capture


both_ways = pytest.mark.parametrize("ask", [streamed, whole], ids=["stream", "whole"])


async def test_a_stream_and_a_whole_reply_are_captured_alike(client, make_call) -> None:
    call = make_call(adapter="shop-v1")
    _, from_stream = await streamed(client, call)
    completion = await client.complete(call)
    assert from_stream.output_ids == completion.capture.output_ids
    assert from_stream.logprobs == completion.capture.logprobs
    assert from_stream.text == completion.capture.text == "We are open from nine to six."
    assert from_stream.exclusion_reason is completion.capture.exclusion_reason is None
    assert completion.usage["completion_tokens"] == len(from_stream.output_ids)


async def test_relayed_chunks_hold_nothing_that_openai_does_not_know(client, make_call) -> None:
    chunks, _ = await streamed(client, make_call())
    assert {key for chunk in chunks for key in chunk} == {"id", "object", "created", "model", "choices"}
    for chunk in chunks:
        choice = chunk["choices"][0]
        assert set(choice) == {"index", "delta", "logprobs", "finish_reason"} and choice["logprobs"] is None
        assert set(choice["delta"]) <= {"role", "content", "tool_calls"}
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"


async def test_log_probs_and_usage_are_relayed_to_those_who_asked(client, make_call) -> None:
    chunks, capture = await streamed(client, make_call(logprobs=True, include_usage=True))
    relayed = [
        token["logprob"]
        for chunk in chunks
        for choice in chunk["choices"]
        for token in (choice["logprobs"] or {"content": []})["content"]
    ]
    assert relayed == capture.logprobs
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"]["completion_tokens"] == len(capture.output_ids)
    assert all(chunk["usage"] is None for chunk in chunks[:-1])


@both_ways
async def test_a_tool_call_comes_whole(client, scripted, make_call, ask) -> None:
    scripted.tool_call = ("order_status", '{"order": 7}')
    _, capture = await ask(client, make_call(tools=[{"function": {"name": "order_status"}}]))
    function = {"name": "order_status", "arguments": '{"order": 7}'}
    assert capture.tool_calls == [{"id": "call_1", "type": "function", "function": function}]
    assert (
        capture.message["content"] is None
        and capture.finish_reason == "tool_calls"
        and capture.exclusion_reason is None
    )


@both_ways
async def test_who_wants_one_call_at_a_time_gets_one(client, scripted, make_call, ask) -> None:
    scripted.tool_call, scripted.calls = ("order_status", '{"order": 7}'), 3
    tools = [{"function": {"name": "order_status"}}]
    _, capture = await ask(client, make_call(tools=tools, parallel_tool_calls=False))
    assert [call["id"] for call in capture.tool_calls] == ["call_1"] and "only the first" in capture.exclusion_reason
    _, capture = await ask(client, make_call(tools=tools))
    assert len(capture.tool_calls) == 3 and capture.exclusion_reason is None


async def test_calls_that_are_cut_are_not_streamed_either(client, scripted, make_call) -> None:
    scripted.tool_call, scripted.calls = ("order_status", '{"order": 7}'), 3
    call = make_call(tools=[{"function": {"name": "order_status"}}], parallel_tool_calls=False)
    chunks, _ = await streamed(client, call)
    pieces = [piece for chunk in chunks for piece in chunk["choices"][0]["delta"].get("tool_calls") or ()]
    assert {piece["index"] for piece in pieces} == {0}


@both_ways
async def test_a_lost_log_prob_is_a_flaw(client, scripted, make_call, ask) -> None:
    scripted.lose_logprob = True
    _, capture = await ask(client, make_call())
    assert capture.exclusion_reason == "8 output ids came with 7 log-probs"


@both_ways
async def test_a_log_prob_that_is_no_number_is_a_flaw(client, scripted, make_call, ask) -> None:
    scripted.nan_at = 2
    _, capture = await ask(client, make_call())
    assert capture.exclusion_reason == "a log-prob is not a finite number" and math.isnan(capture.logprobs[2])


@both_ways
async def test_a_constrained_reply_is_flawed(client, make_call, ask) -> None:
    _, capture = await ask(client, make_call(response_format={"type": "json_object"}))
    assert capture.exclusion_reason.startswith("a grammar constrained the reply")


async def test_a_stream_that_breaks_is_captured_as_far_as_it_came(client, scripted, make_call) -> None:
    scripted.die_after = 3
    chunks = []
    with pytest.raises(EngineUnavailable, match="broke off"):
        async with client.stream(make_call()) as reply:
            async for chunk in reply:
                chunks.append(chunk)
    assert reply.capture.text == "We are open" and len(reply.capture.logprobs) == 3
    assert reply.capture.output_ids == [] and "broke off" in reply.capture.exclusion_reason


def said(count: int) -> Callable[[Reply], bool]:
    """Of replies that halt after so many tokens, until somebody aborts them."""
    return lambda reply: len(reply.output_ids) >= count


async def test_who_leaves_early_comes_home_with_the_ids_so_far(client, scripted, make_call) -> None:
    call = make_call()
    scripted.held = said(5)
    async with client.stream(call) as reply:
        async for chunk in reply:
            if "are" in chunk["choices"][0]["delta"].get("content", ""):
                break
    assert call.rid in scripted.aborted
    assert 2 <= len(reply.capture.output_ids) == len(reply.capture.logprobs) <= 5
    assert (reply.capture.exclusion_reason, reply.capture.finish_reason) == (None, "abort")


async def test_who_is_cancelled_comes_home_with_the_ids_so_far(client, scripted, make_call) -> None:
    scripted.held = said(5)
    replies = []

    async def listen() -> None:
        async with client.stream(make_call()) as reply:
            replies.append(reply)
            async for _ in reply:
                pass

    task = asyncio.create_task(listen())
    while not (replies and all(reply.output_ids for reply in list(scripted.running.values()))):
        await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    capture = replies[0].capture
    assert 0 < len(capture.output_ids) == len(capture.logprobs) <= 5


async def test_an_aborted_whole_reply_keeps_what_was_said(client, scripted, make_call) -> None:
    scripted.held = said(5)
    call = make_call()
    asking = asyncio.create_task(client.complete(call))
    while not any(reply.output_ids for reply in list(scripted.running.values())):
        await asyncio.sleep(0.01)
    await client.abort(call.rid)
    completion = await asking
    assert completion.finish_reason == "abort" and completion.capture.exclusion_reason is None
    assert 0 < len(completion.capture.output_ids) <= 5


@both_ways
@pytest.mark.parametrize(
    ("status", "raised"), [(400, EngineRefused), (503, EngineUnavailable), (429, EngineUnavailable)]
)
async def test_a_refusal_keeps_the_engines_words(client, scripted, make_call, ask, status, raised) -> None:
    scripted.refuse = status
    with pytest.raises(raised, match="the script says no"):
        await ask(client, make_call())


@both_ways
async def test_an_adapter_that_is_not_held_is_another_replicas_chance(client, make_call, ask) -> None:
    with pytest.raises(AdapterMissing) as caught:
        await ask(client, make_call(adapter="shop-v9"))
    assert isinstance(caught.value, EngineUnavailable) and caught.value.status == 503


@both_ways
async def test_silence_ends_in_a_sentence(client, scripted, make_call, ask) -> None:
    scripted.hang, client.patience = True, 0.5
    with pytest.raises(EngineUnavailable, match="did not answer in time"):
        await ask(client, make_call())
    assert not await client.ready()
    scripted.hang = False  # or the hung requests would keep the server from ending


@both_ways
async def test_a_closed_door_ends_in_a_sentence(make_call, ask) -> None:
    nobody = EngineClient("http://127.0.0.1:9")
    with pytest.raises(EngineUnavailable, match="does not answer"):
        await ask(nobody, make_call())
    await nobody.aclose()


async def test_a_wrong_key_is_our_fault_and_not_the_clients(scripted_url, make_call) -> None:
    stranger = EngineClient(scripted_url, "wrong", "wrong")
    with pytest.raises(EngineRefused) as caught:
        await stranger.complete(make_call())
    assert caught.value.engine_status == 401 and caught.value.status == 502
    await stranger.aclose()
