"""Promises about health, keys, pauses, and tools and grammars."""

import asyncio
import json

import pytest

from app.inference.keys import EngineKeys
from app.inference.pool import connect
from app.inference.transport import EngineRefused, EngineUnavailable
from demo.dialogues import ORDER_STATUS, SYSTEM
from tests.contract.engine.conftest import Address
from tests.contract.engine.served_engines import KEYS, KINDS, SCRIPTED, ServedEngine
from tests.contract.engine.test_replies import assert_exact
from tests.support.engine_fixture import DEMO_MODEL
from tests.support.engine_replies import GetCapture, MakeCall, both_modes

pytestmark = pytest.mark.timeout(600)


async def test_running_engine_is_ready_and_generates(served: ServedEngine) -> None:
    assert await served.client.is_ready() and await served.client.can_generate()
    assert await served.client.context_length() == served.context_length


@pytest.mark.parametrize("kind", KINDS[1:])
async def test_engine_that_cannot_be_reached_is_unavailable(kind: str, make_call: MakeCall) -> None:
    client = connect(Address("http://127.0.0.1:9", kind), KEYS)
    assert not await client.is_ready() and not await client.can_generate()
    with pytest.raises(EngineUnavailable):
        await client.complete(make_call())
    with pytest.raises(EngineUnavailable):
        await client.count_running()
    await client.aclose()


async def test_wrong_keys_are_refused(served: ServedEngine, make_call: MakeCall) -> None:
    """The key of chats does not administer."""
    client = served.connect(EngineKeys("wrong", KEYS.api))
    with pytest.raises(EngineRefused) as refusal:
        await client.complete(make_call())
    assert refusal.value.engine_status == 401 and not refusal.value.is_fault_of_request
    for act in (client.abort("chatcmpl-1"), client.unload_adapter("nobody-v1")):
        with pytest.raises(EngineRefused):
            await act
    await client.aclose()


async def test_paused_engine_is_not_ready_and_requests_wait(served: ServedEngine, make_call: MakeCall) -> None:
    running = asyncio.create_task(served.client.complete(make_call(max_tokens=60)))
    async with served.client.paused():
        assert not await served.client.is_ready()
        waiting = asyncio.create_task(served.client.complete(make_call(max_tokens=8)))
        await asyncio.sleep(0.2)
        assert not waiting.done()
    assert await served.client.is_ready()
    for reply in (running, waiting):
        assert_exact(served, None, (await reply).capture)


@both_modes
async def test_schema_constrains_the_reply_and_excludes_it(
    served: ServedEngine, make_call: MakeCall, get_capture: GetCapture
) -> None:
    if served.kind == SCRIPTED:
        pytest.skip("the scripted engine has no grammars")
    schema = {"type": "object", "properties": {"open": {"type": "boolean"}}, "required": ["open"]}
    response_format = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}
    capture = await get_capture(served.client, make_call(response_format=response_format, max_tokens=200))
    assert isinstance(json.loads(capture.text)["open"], bool)
    assert "grammar" in (capture.exclusion_reason or "")
    assert len(capture.output_ids) == len(capture.logprobs)


@both_modes
async def test_required_tool_is_called(served: ServedEngine, make_call: MakeCall, get_capture: GetCapture) -> None:
    if served.kind == SCRIPTED:
        pytest.skip("the scripted engine has no grammars")
    parameters = {"type": "object", "properties": {"order": {"enum": [7, 8]}}, "required": ["order"]}
    tool = {"type": "function", "function": {"name": "find", "parameters": parameters}}
    capture = await get_capture(served.client, make_call(tools=[tool], tool_choice="required", max_tokens=100))
    [call] = capture.tool_calls[:1]
    assert call["function"]["name"] == "find" and json.loads(call["function"]["arguments"])["order"] in (7, 8)
    assert set(call) == {"id", "type", "function"} and capture.finish_reason == "tool_calls"


@both_modes
async def test_tool_calls_of_the_model_are_parsed_and_exact(
    served: ServedEngine, make_call: MakeCall, get_capture: GetCapture
) -> None:
    if served.kind == SCRIPTED or not (DEMO_MODEL / "model.safetensors").exists():
        pytest.skip("only the demo model knows the tool")
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "Where is my order 4321?"}]
    # At a higher temperature a call of so small a model may have arguments that are no JSON.
    fields = {"messages": messages, "max_tokens": 80, "temperature": 0.1, "tools": [ORDER_STATUS]}
    captures = [await get_capture(served.client, make_call(seed=seed, **fields)) for seed in range(2)]
    functions = [call["function"] for capture in captures for call in capture.tool_calls]
    assert {function["name"] for function in functions} == {"order_status"}
    assert all(json.loads(function["arguments"]).keys() == {"order_id"} for function in functions)
    for capture in captures:
        assert_exact(served, None, capture, temperature=0.1)
