"""Promises about replies: exact ids and log-probs, ends, aborts, long prompts, capacity."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest
import torch

from app.inference.capture import Capture
from app.inference.transport import EngineRefused
from tests.contract.engine.served_engines import KEYS, SCRIPTED, ServedEngine
from tests.support.engine_replies import GetCapture, MakeCall, both_modes, read_stream

pytestmark = pytest.mark.timeout(600)
MAX_DIFFERENCE = 1e-4  # of log-probs in float32
OPENAI_CHOICE = {"index", "delta", "logprobs", "finish_reason"}
OPENAI_CHUNK = {"id", "object", "created", "model", "choices", "usage"}


def assert_exact(
    served: ServedEngine, adapter: str | None, capture: Capture, *, temperature: float = 1.0, bias: Any = None
) -> None:
    """Assert that the version computes the captured log-probs from the captured ids."""
    assert capture.exclusion_reason is None
    assert len(capture.output_ids) == len(capture.logprobs) > 0
    ids = capture.prompt_ids + capture.output_ids
    expected = served.reference.logprobs(adapter, ids, temperature=temperature, logit_bias=bias)
    actual = torch.tensor(capture.logprobs)
    torch.testing.assert_close(actual, expected[-len(actual) :], atol=MAX_DIFFERENCE, rtol=0)


@both_modes
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("adapter", [None, "promise-v1"])
async def test_log_probs_are_those_of_the_named_version(
    served: ServedEngine, make_call: MakeCall, get_capture: GetCapture, temperature: float, adapter: str | None
) -> None:
    if adapter is not None:
        await served.client.load_adapter(adapter, served.reference.adapter(adapter, seed=1))
    capture = await get_capture(served.client, make_call(adapter=adapter, temperature=temperature))
    assert_exact(served, adapter, capture, temperature=temperature)


@both_modes
async def test_prompt_ids_are_those_of_tokenize(
    served: ServedEngine, make_call: MakeCall, get_capture: GetCapture
) -> None:
    call = make_call("Grüß Gott 🚲 日本語", max_tokens=4)
    assert (await get_capture(served.client, call)).prompt_ids == await served.client.tokenize(call)


@both_modes
async def test_given_prompt_ids_are_computed_as_they_are(
    served: ServedEngine, make_call: MakeCall, get_capture: GetCapture
) -> None:
    """No text renders to these."""
    ids = [5, 5, 300, 7, 7, 7, 12, 3, 299]
    capture = await get_capture(served.client, make_call(prompt_ids=ids, max_tokens=16))
    assert capture.prompt_ids == ids
    assert_exact(served, None, capture)


async def test_streamed_and_whole_reply_are_equal(served: ServedEngine, make_call: MakeCall) -> None:
    call = make_call(temperature=0.0, max_tokens=24)
    whole = (await served.client.complete(call)).capture
    _, streamed = await read_stream(served.client, replace(call, rid=f"{call.rid[:-1]}z"))
    assert (streamed.output_ids, streamed.text) == (whole.output_ids, whole.text)
    assert (streamed.finish_reason, streamed.prompt_ids) == (whole.finish_reason, whole.prompt_ids)


async def test_chunks_have_openai_fields_only(served: ServedEngine, make_call: MakeCall) -> None:
    bias = served.never_ends or None
    call = make_call(max_tokens=6, include_usage=True, logprobs=True, logit_bias=bias)
    chunks, capture = await read_stream(served.client, call)
    assert set().union(*chunks) <= OPENAI_CHUNK
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    assert set().union(*choices) <= OPENAI_CHOICE
    assert {name for choice in choices for name in choice["delta"]} <= {"role", "content"}
    usage = chunks[-1]["usage"]
    assert {chunk["model"] for chunk in chunks} == {call.target.label} and usage and usage["completion_tokens"] == 6
    sent = [token["logprob"] for choice in choices for token in (choice["logprobs"] or {"content": []})["content"]]
    assert sent == capture.logprobs


@both_modes
async def test_single_token_is_exact(served: ServedEngine, make_call: MakeCall, get_capture: GetCapture) -> None:
    capture = await get_capture(served.client, make_call(max_tokens=1, logit_bias=served.never_ends or None))
    assert (len(capture.output_ids), capture.finish_reason) == (1, "length")
    assert_exact(served, None, capture, bias=served.never_ends)


@both_modes
async def test_reply_ends_at_its_limit(served: ServedEngine, make_call: MakeCall, get_capture: GetCapture) -> None:
    capture = await get_capture(served.client, make_call(max_tokens=50, logit_bias=served.never_ends or None))
    assert (len(capture.output_ids), capture.finish_reason) == (50, "length")


async def test_aborted_reply_returns_what_was_generated(served: ServedEngine, make_call: MakeCall) -> None:
    call = make_call(max_tokens=1400, temperature=1.5, logit_bias=served.never_ends or None)
    reply = asyncio.create_task(served.client.complete(call))
    await wait_for_running(served, 1)
    async with asyncio.timeout(60):
        while not reply.done():
            await served.client.abort(call.rid)
            await asyncio.wait([reply], timeout=0.2)
    capture = (await reply).capture
    assert capture.finish_reason == "abort" and len(capture.output_ids) < 1400
    assert len(capture.output_ids) == len(capture.logprobs)


async def test_abort_of_an_unknown_reply_is_ignored(served: ServedEngine, make_call: MakeCall) -> None:
    await served.client.abort(make_call().rid)
    assert (await served.client.complete(make_call(max_tokens=2))).capture.output_ids


async def test_stream_left_early_ends_the_work_and_keeps_the_ids(served: ServedEngine, make_call: MakeCall) -> None:
    call = make_call(max_tokens=1400, temperature=1.5, logit_bias=served.never_ends or None)
    async with served.client.stream(call) as reply:
        chunks = aiter(reply)
        for _ in range(3):  # the first may hold the role alone
            await anext(chunks)
    capture = reply.capture
    assert capture is not None and capture.finish_reason == "abort"
    assert 0 < len(capture.output_ids) < 1400
    await wait_for_running(served, 0)


async def test_disconnect_ends_the_work(served: ServedEngine, make_call: MakeCall) -> None:
    """A client that vanishes, as a killed process does: its connection closes and nothing is aborted."""
    vanishing = served.connect(KEYS)
    call = make_call(max_tokens=1400, temperature=1.5, logit_bias=served.never_ends or None)
    reply = asyncio.create_task(vanishing.complete(call))
    await wait_for_running(served, 1)
    reply.cancel()
    await asyncio.wait([reply])
    await vanishing.aclose()
    await wait_for_running(served, 0)


@both_modes
async def test_long_prompt_is_exact(served: ServedEngine, make_call: MakeCall, get_capture: GetCapture) -> None:
    ids = [3 + number * 7 % 290 for number in range(1900)]
    capture = await get_capture(served.client, make_call(prompt_ids=ids, max_tokens=8))
    assert capture.prompt_ids == ids
    assert_exact(served, None, capture)


@both_modes
async def test_prompt_beyond_the_context_is_refused_as_such(
    served: ServedEngine, make_call: MakeCall, get_capture: GetCapture
) -> None:
    if served.kind == SCRIPTED:
        pytest.skip("the scripted engine has no limit")
    with pytest.raises(EngineRefused) as refusal:
        await get_capture(served.client, make_call(prompt_ids=[5] * 2100, max_tokens=8))
    assert (refusal.value.status, refusal.value.code) == (400, "context_length_exceeded")
    assert await served.client.can_generate()


async def test_more_replies_than_the_engine_generates_at_once_wait(served: ServedEngine, make_call: MakeCall) -> None:
    adapter = "crowd-v1"
    await served.client.load_adapter(adapter, served.reference.adapter(adapter, seed=2))
    names = [None, adapter] * 20
    calls = [make_call(f"Question {number}?", adapter=name, max_tokens=12) for number, name in enumerate(names)]
    for name, completion in zip(names, await asyncio.gather(*map(served.client.complete, calls)), strict=True):
        assert_exact(served, name, completion.capture)


async def test_running_replies_are_counted(served: ServedEngine, make_call: MakeCall) -> None:
    await wait_for_running(served, 0)
    call = make_call(max_tokens=1400, temperature=1.5, logit_bias=served.never_ends or None)
    async with served.client.stream(call) as reply:
        async for _ in reply:
            break
        await wait_for_running(served, 1)
    await wait_for_running(served, 0)


async def wait_for_running(served: ServedEngine, count: int) -> None:
    async with asyncio.timeout(60):
        while await served.client.count_running() != count:
            await asyncio.sleep(0.02)
