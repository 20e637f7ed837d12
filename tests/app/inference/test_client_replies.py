"""Replies of a scripted engine: client chunks, captures and errors."""

import asyncio
import math
from collections.abc import Callable

import pytest

from app.inference.engine import EngineClient
from app.inference.sglang.client import SGLangClient
from app.inference.stream import ChatStream
from app.inference.transport import AdapterMissing, EngineRefused, EngineUnavailable
from tests.support.engine_replies import GetCapture, MakeCall, both_modes, read_stream
from tests.support.scripted_engine import Reply, ScriptedEngine


async def test_streamed_and_complete_reply_have_equal_captures(client: EngineClient, make_call: MakeCall) -> None:
    call = make_call(adapter="shop-v1")
    _, from_stream = await read_stream(client, call)
    completion = await client.complete(call)
    assert from_stream.output_ids == completion.capture.output_ids
    assert from_stream.logprobs == completion.capture.logprobs
    assert from_stream.text == completion.capture.text == "We are open from nine to six."
    assert from_stream.exclusion_reason is completion.capture.exclusion_reason is None
    assert completion.usage["completion_tokens"] == len(from_stream.output_ids)


async def test_client_chunks_have_openai_fields_only(client: EngineClient, make_call: MakeCall) -> None:
    chunks, _ = await read_stream(client, make_call())
    assert {key for chunk in chunks for key in chunk} == {"id", "object", "created", "model", "choices"}
    for chunk in chunks:
        choice = chunk["choices"][0]
        assert set(choice) == {"index", "delta", "logprobs", "finish_reason"} and choice["logprobs"] is None
        assert set(choice["delta"]) <= {"role", "content", "tool_calls"}
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"


async def test_log_probs_and_usage_are_passed_on_if_requested(client: EngineClient, make_call: MakeCall) -> None:
    chunks, capture = await read_stream(client, make_call(logprobs=True, include_usage=True))
    relayed = [
        token["logprob"]
        for chunk in chunks
        for choice in chunk["choices"]
        for token in (choice["logprobs"] or {"content": []})["content"]
    ]
    assert relayed == capture.logprobs
    usage = chunks[-1]["usage"]
    assert usage is not None and usage["completion_tokens"] == len(capture.output_ids) and not chunks[-1]["choices"]
    assert all(chunk["usage"] is None for chunk in chunks[:-1])


@both_modes
async def test_tool_call_is_complete(
    client: EngineClient, scripted: ScriptedEngine, make_call: MakeCall, get_capture: GetCapture
) -> None:
    scripted.tool_call = ("order_status", '{"order": 7}')
    capture = await get_capture(client, make_call(tools=[{"function": {"name": "order_status"}}]))
    function = {"name": "order_status", "arguments": '{"order": 7}'}
    assert capture.tool_calls == [{"id": "call_1", "type": "function", "function": function}]
    assert (
        capture.message["content"] is None
        and capture.finish_reason == "tool_calls"
        and capture.exclusion_reason is None
    )


@both_modes
async def test_parallel_tool_calls_false_passes_one_call(
    client: EngineClient, scripted: ScriptedEngine, make_call: MakeCall, get_capture: GetCapture
) -> None:
    scripted.tool_call, scripted.num_tool_calls = ("order_status", '{"order": 7}'), 3
    tools = [{"function": {"name": "order_status"}}]
    capture = await get_capture(client, make_call(tools=tools, parallel_tool_calls=False))
    assert [call["id"] for call in capture.tool_calls] == ["call_1"] and "only the first" in (
        capture.exclusion_reason or ""
    )
    capture = await get_capture(client, make_call(tools=tools))
    assert len(capture.tool_calls) == 3 and capture.exclusion_reason is None


async def test_omitted_tool_calls_are_not_streamed(
    client: EngineClient, scripted: ScriptedEngine, make_call: MakeCall
) -> None:
    scripted.tool_call, scripted.num_tool_calls = ("order_status", '{"order": 7}'), 3
    call = make_call(tools=[{"function": {"name": "order_status"}}], parallel_tool_calls=False)
    chunks, _ = await read_stream(client, call)
    pieces = [piece for chunk in chunks for piece in chunk["choices"][0]["delta"].get("tool_calls") or ()]
    assert {piece["index"] for piece in pieces} == {0}


@both_modes
async def test_missing_log_prob_excludes_reply(
    client: EngineClient, scripted: ScriptedEngine, make_call: MakeCall, get_capture: GetCapture
) -> None:
    scripted.omit_last_logprob = True
    capture = await get_capture(client, make_call())
    assert capture.exclusion_reason == "8 output ids came with 7 log-probs"


@both_modes
async def test_nan_log_prob_excludes_reply(
    client: EngineClient, scripted: ScriptedEngine, make_call: MakeCall, get_capture: GetCapture
) -> None:
    scripted.nan_at = 2
    capture = await get_capture(client, make_call())
    assert capture.exclusion_reason == "a log-prob is not a finite number" and math.isnan(capture.logprobs[2])


@both_modes
async def test_grammar_constrained_reply_is_excluded(
    client: EngineClient, make_call: MakeCall, get_capture: GetCapture
) -> None:
    capture = await get_capture(client, make_call(response_format={"type": "json_object"}))
    assert (capture.exclusion_reason or "").startswith("a grammar constrained the reply")


async def test_broken_stream_is_captured_so_far(
    client: EngineClient, scripted: ScriptedEngine, make_call: MakeCall
) -> None:
    scripted.drop_after_tokens = 3
    chunks = []
    with pytest.raises(EngineUnavailable, match="closed the connection"):
        async with client.stream(make_call()) as reply:
            async for chunk in reply:
                chunks.append(chunk)
    capture = reply.capture
    assert capture is not None and capture.text == "We are open" and len(capture.logprobs) == 3
    assert capture.output_ids == [] and "closed the connection" in (capture.exclusion_reason or "")


def blocked_after(count: int) -> Callable[[Reply], bool]:
    """Return a condition that blocks replies after `count` tokens until they are aborted."""
    return lambda reply: len(reply.output_ids) >= count


async def test_stream_left_early_captures_ids_so_far(
    client: EngineClient, scripted: ScriptedEngine, make_call: MakeCall
) -> None:
    call = make_call()
    scripted.is_blocked = blocked_after(5)
    async with client.stream(call) as reply:
        async for chunk in reply:
            if "are" in (chunk["choices"][0]["delta"].get("content") or ""):
                break
    assert call.rid in scripted.aborted
    capture = reply.capture
    assert capture is not None and 2 <= len(capture.output_ids) == len(capture.logprobs) <= 5
    assert (capture.exclusion_reason, capture.finish_reason) == (None, "abort")


async def test_cancellation_captures_ids_so_far(
    client: EngineClient, scripted: ScriptedEngine, make_call: MakeCall
) -> None:
    scripted.is_blocked = blocked_after(5)
    replies: list[ChatStream] = []

    async def read() -> None:
        async with client.stream(make_call()) as reply:
            replies.append(reply)
            async for _ in reply:
                pass

    task = asyncio.create_task(read())
    while not (replies and all(reply.output_ids for reply in list(scripted.running.values()))):
        await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    capture = replies[0].capture
    assert capture is not None and 0 < len(capture.output_ids) == len(capture.logprobs) <= 5


async def test_aborted_reply_keeps_its_output(
    client: EngineClient, scripted: ScriptedEngine, make_call: MakeCall
) -> None:
    scripted.is_blocked = blocked_after(5)
    call = make_call()
    task = asyncio.create_task(client.complete(call))
    while not any(reply.output_ids for reply in list(scripted.running.values())):
        await asyncio.sleep(0.01)
    await client.abort(call.rid)
    completion = await task
    assert completion.capture.finish_reason == "abort" and completion.capture.exclusion_reason is None
    assert 0 < len(completion.capture.output_ids) <= 5


@both_modes
@pytest.mark.parametrize(
    ("status", "raised", "message"),
    [
        (400, EngineRefused, "the script says no"),
        (503, EngineUnavailable, "its log has the reason"),
        (429, EngineUnavailable, "its log has the reason"),
    ],
)
async def test_refusal_keeps_engine_message_and_failure_does_not(
    client: EngineClient,
    scripted: ScriptedEngine,
    make_call: MakeCall,
    get_capture: GetCapture,
    status: int,
    raised: type[Exception],
    message: str,
) -> None:
    scripted.refuse_status = status
    with pytest.raises(raised, match=message):
        await get_capture(client, make_call())


@both_modes
async def test_unloaded_adapter_is_adapter_missing(
    client: EngineClient, make_call: MakeCall, get_capture: GetCapture
) -> None:
    with pytest.raises(AdapterMissing) as error_info:
        await get_capture(client, make_call(adapter="shop-v9"))
    assert isinstance(error_info.value, EngineUnavailable) and error_info.value.status == 503


@both_modes
async def test_read_timeout_is_engine_unavailable(
    client: SGLangClient, scripted: ScriptedEngine, make_call: MakeCall, get_capture: GetCapture
) -> None:
    scripted.hang, client._transport.read_timeout = True, 0.5
    with pytest.raises(EngineUnavailable, match="did not respond in time"):
        await get_capture(client, make_call())
    assert not await client.is_ready()
    scripted.hang = False  # or the hung requests would keep the server from ending


@both_modes
async def test_refused_connection_is_engine_unavailable(make_call: MakeCall, get_capture: GetCapture) -> None:
    unreachable = SGLangClient("http://127.0.0.1:9")
    with pytest.raises(EngineUnavailable, match="cannot be reached"):
        await get_capture(unreachable, make_call())
    await unreachable.aclose()


async def test_wrong_engine_key_is_502(scripted_url: str, make_call: MakeCall) -> None:
    client_with_wrong_key = SGLangClient(scripted_url, "wrong", "wrong")
    with pytest.raises(EngineRefused) as error_info:
        await client_with_wrong_key.complete(make_call())
    assert error_info.value.engine_status == 401 and error_info.value.status == 502
    await client_with_wrong_key.aclose()
