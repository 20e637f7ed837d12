"""Exact captures: the real engine's tokens and log-probs equal those of transformers."""

import asyncio
import json
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch

from app.inference.capture import Capture
from app.inference.engine import EngineClient
from demo.dialogues import ORDER_STATUS, SYSTEM
from tests.clients.retries import with_retries
from tests.support.engine_adapters import ReferenceWeights, bias_without_end
from tests.support.engine_fixture import DEMO_MODEL
from tests.support.engine_replies import GetCapture, MakeCall, both_modes

pytestmark = pytest.mark.engine


def assert_exact(weights: ReferenceWeights, adapter: str | None, capture: Capture, *, temperature: float = 1.0) -> None:
    assert capture.exclusion_reason is None
    assert len(capture.output_ids) == len(capture.logprobs) > 0
    ids = capture.prompt_ids + capture.output_ids
    expected = weights.logprobs(adapter, ids, temperature=temperature)[-len(capture.output_ids) :]
    torch.testing.assert_close(torch.tensor(capture.logprobs), expected, atol=1e-4, rtol=0)


@pytest.fixture(scope="module")
def adapter(weights: ReferenceWeights) -> Path:
    return weights.adapter("exact-v1", seed=1)


@both_modes
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("name", [None, "exact-v1"])
async def test_log_probs_match_sampling_distribution(
    engine_client: EngineClient,
    weights: ReferenceWeights,
    adapter: Path,
    make_call: MakeCall,
    get_capture: GetCapture,
    temperature: float,
    name: str | None,
) -> None:
    await engine_client.load_adapter("exact-v1", adapter)
    capture = await get_capture(engine_client, make_call(adapter=name, temperature=temperature))
    assert_exact(weights, name, capture, temperature=temperature)


@both_modes
async def test_several_turns_stay_exact(
    engine_client: EngineClient, weights: ReferenceWeights, adapter: Path, make_call: MakeCall, get_capture: GetCapture
) -> None:
    await engine_client.load_adapter("exact-v1", adapter)
    messages: list[Mapping[str, object]] = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "What does a repair cost?"},
    ]
    for question in ("And on Sundays?", "Thank you.", "Bye."):
        capture = await get_capture(engine_client, make_call(messages=messages, adapter="exact-v1", max_tokens=40))
        assert_exact(weights, "exact-v1", capture)
        messages = [*messages, capture.message, {"role": "user", "content": question}]


@both_modes
async def test_single_token_is_exact(
    engine_client: EngineClient, weights: ReferenceWeights, make_call: MakeCall, get_capture: GetCapture
) -> None:
    capture = await get_capture(engine_client, make_call(max_tokens=1))
    assert len(capture.output_ids) == 1
    assert_exact(weights, None, capture)


@both_modes
async def test_multi_token_characters_are_exact(
    engine_client: EngineClient, weights: ReferenceWeights, make_call: MakeCall, get_capture: GetCapture
) -> None:
    """Tokens without text arrive late in a stream: none of their log-probs may be lost."""
    logit_bias = {
        str(token): 4.0 for token in torch.randint(3, 300, (40,), generator=torch.Generator().manual_seed(0)).tolist()
    }
    for _ in range(5):
        capture = await get_capture(
            engine_client, make_call("Grüß Gott 🚲 日本語", temperature=1.5, max_tokens=80, logit_bias=logit_bias)
        )
        assert capture.exclusion_reason is None and len(capture.output_ids) == len(capture.logprobs)


@both_modes
async def test_stop_string_is_cut_from_text_but_not_from_tokens(
    engine_client: EngineClient, weights: ReferenceWeights, make_call: MakeCall, get_capture: GetCapture
) -> None:
    plain = await get_capture(engine_client, make_call(max_tokens=48, temperature=0.0))
    stop = plain.text[len(plain.text) // 2 :][:2]
    capture = await get_capture(engine_client, make_call(max_tokens=48, temperature=0.0, stop=(stop,)))
    assert capture.finish_reason == "stop" and stop not in capture.text
    assert capture.output_ids == plain.output_ids[: len(capture.output_ids)]
    assert_exact(weights, None, capture)


@both_modes
async def test_end_of_turn_token_is_recorded(
    engine_client: EngineClient,
    weights: ReferenceWeights,
    engine_model: Path,
    make_call: MakeCall,
    get_capture: GetCapture,
) -> None:
    end = json.loads((engine_model / "config.json").read_text())["eos_token_id"]
    capture = await get_capture(engine_client, make_call(max_tokens=512, logit_bias={str(end): 8.0}))
    assert capture.finish_reason == "stop" and capture.output_ids[-1] == end
    assert len(capture.output_ids) == len(capture.logprobs) and capture.exclusion_reason is None


@both_modes
async def test_thirty_two_concurrent_replies_are_exact(
    engine_client: EngineClient, weights: ReferenceWeights, adapter: Path, make_call: MakeCall, get_capture: GetCapture
) -> None:
    await engine_client.load_adapter("exact-v1", adapter)
    names = [None, "exact-v1"] * 16
    calls = [make_call(f"Question {number}?", adapter=name, max_tokens=24) for number, name in enumerate(names)]
    captures = await asyncio.gather(*[get_capture(engine_client, call) for call in calls])
    for name, capture in zip(names, captures, strict=True):
        assert_exact(weights, name, capture)


async def test_stream_left_early_captures_exact_ids(
    engine_client: EngineClient, weights: ReferenceWeights, engine_model: Path, make_call: MakeCall
) -> None:
    # Without its end-of-turn token the reply cannot end before it is left.
    without_end = bias_without_end(engine_model)
    call = make_call(max_tokens=1500, temperature=1.5, logit_bias=without_end)
    async with engine_client.stream(call) as reply:
        async for _ in reply:
            break
    capture = reply.capture
    assert capture is not None
    assert capture.finish_reason == "abort" and 0 < len(capture.output_ids) < 1500
    num_tokens = len(capture.logprobs)
    assert (capture.exclusion_reason is None) == (num_tokens == len(capture.output_ids))
    ids = capture.prompt_ids + capture.output_ids
    expected = weights.logprobs(None, ids, temperature=1.5, logit_bias=without_end)
    first = len(capture.prompt_ids) - 1
    torch.testing.assert_close(torch.tensor(capture.logprobs), expected[first : first + num_tokens], atol=1e-4, rtol=0)


@with_retries
async def test_json_schema_is_obeyed_and_excluded(engine_client: EngineClient, make_call: MakeCall) -> None:
    schema = {
        "type": "object",
        "properties": {"open": {"type": "boolean"}},
        "required": ["open"],
        "additionalProperties": False,
    }
    json_schema_format = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    completion = await engine_client.complete(make_call(response_format=json_schema_format, max_tokens=200))
    assert completion.capture.exclusion_reason is not None and completion.capture.exclusion_reason.startswith(
        "a grammar"
    )
    assert isinstance(json.loads(completion.capture.message["content"] or "")["open"], bool)


@both_modes
@with_retries
async def test_parser_reads_tool_calls_of_demo_model(
    engine_client: EngineClient, engine_model: Path, make_call: MakeCall, get_capture: GetCapture
) -> None:
    if engine_model != DEMO_MODEL:
        pytest.skip("only the demo model knows the tool")
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "Where is my order 4321?"}]
    calls = [
        make_call(messages=messages, max_tokens=80, temperature=0.7, seed=seed, tools=[ORDER_STATUS])
        for seed in range(8)
    ]
    captures = [await get_capture(engine_client, call) for call in calls]
    functions = [tool["function"] for capture in captures for tool in capture.tool_calls]
    assert len(functions) >= 4, [capture.text for capture in captures]
    assert {function["name"] for function in functions} == {"order_status"}
    assert all(json.loads(function["arguments"]).keys() == {"order_id"} for function in functions)
    assert all(capture.exclusion_reason is None for capture in captures), "exact, tool calls or not"


@with_retries
async def test_running_replies_are_counted(engine_client: EngineClient, make_call: MakeCall) -> None:
    async def wait_for(is_expected: Callable[[int], bool]) -> None:
        async with asyncio.timeout(60):
            while not is_expected(await engine_client.count_running()):
                await asyncio.sleep(0.05)

    await wait_for(lambda count: count == 0)
    call = make_call(max_tokens=1500, temperature=1.5)
    async with engine_client.stream(call) as reply:
        async for _ in reply:
            break
        await wait_for(lambda count: count == 1)
    await wait_for(lambda count: count == 0)
