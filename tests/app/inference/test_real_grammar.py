"""Grammar constraints on the real engine: obeyed, excluded from training, and safe with invalid schemas."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from app.inference.client import EngineClient
from app.inference.transport import EngineRefused, EngineUnavailable
from tests.clients.retries import with_retries
from tests.support.engine_replies import GetCapture, MakeCall, both_modes

pytestmark = pytest.mark.engine
ORDER = {
    "type": "object",
    "properties": {"order": {"type": "integer", "enum": [7, 8, 9]}, "ready": {"type": "boolean"}},
    "required": ["order", "ready"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "order_status", "parameters": ORDER}}


def schema(body: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "order", "schema": body, "strict": True}}


@pytest.fixture(scope="module")
def tokenizer(engine_model: Path) -> Tokenizer:
    return Tokenizer.from_file(str(engine_model / "tokenizer.json"))


@both_modes
@with_retries
async def test_schema_is_obeyed_and_excluded(
    engine_client: EngineClient, make_call: MakeCall, get_capture: GetCapture
) -> None:
    capture = await get_capture(engine_client, make_call(response_format=schema(ORDER), max_tokens=64))
    parsed = json.loads(capture.text)
    assert set(parsed) == {"order", "ready"} and isinstance(parsed["order"], int) and isinstance(parsed["ready"], bool)
    assert len(capture.output_ids) == len(capture.logprobs) and "grammar" in (capture.exclusion_reason or "")


@pytest.mark.parametrize("response_format", [None, schema({"type": "array", "items": {"type": "integer"}})])
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "order_status"}}])
@both_modes
async def test_required_tool_is_called_without_free_white_space(
    engine_client: EngineClient,
    make_call: MakeCall,
    choice: Any,
    response_format: Any,
    get_capture: GetCapture,
    tokenizer: Tokenizer,
) -> None:
    """A response format beside it changes nothing: the call takes the place of the text."""
    tokens = {number: tokenizer.decode([number]) for number in range(tokenizer.get_vocab_size())}
    bias = {str(number): 30.0 for number, text in tokens.items() if text.isspace()}
    call = make_call(
        "My order?",
        tools=[TOOL],
        tool_choice=choice,
        response_format=response_format,
        max_tokens=60,
        logit_bias=bias,
    )
    capture = await get_capture(engine_client, call)
    assert len(capture.output_ids) == len(capture.logprobs) and "grammar" in (capture.exclusion_reason or "")
    tool_call = capture.tool_calls[0]
    assert tool_call["function"]["name"] == "order_status"
    assert set(json.loads(tool_call["function"]["arguments"])) == {"order", "ready"}


@both_modes
async def test_reply_with_optional_tools_is_a_call_or_has_the_response_format(
    engine_client: EngineClient, make_call: MakeCall, get_capture: GetCapture, tokenizer: Tokenizer
) -> None:
    call_token, seen = tokenizer.encode("<tool_call>", add_special_tokens=False).ids[0], set()
    for bias in (50.0, -50.0):  # towards a call, then away from it
        call = make_call(
            "My order?",
            tools=[TOOL],
            tool_choice="auto",
            parallel_tool_calls=False,
            response_format=schema(ORDER),
            max_tokens=60,
            logit_bias={str(call_token): bias},
        )
        capture = await get_capture(engine_client, call)
        is_call = bool(capture.tool_calls)
        text = capture.tool_calls[0]["function"]["arguments"] if is_call else capture.text
        assert set(json.loads(text)) == {"order", "ready"} and "grammar" in (capture.exclusion_reason or "")
        seen.add(is_call)
    assert seen == {True, False}


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": schema({"type": "nonsense"})},
        {"response_format": schema({"type": "object", "properties": {"a": {"$ref": "#/nowhere"}}})},
        {"response_format": schema({"type": "string", "pattern": "(((("})},
        {"response_format": schema({"type": "string", "pattern": "(a+)+$" * 50})},
        {"response_format": schema({"$ref": "http://127.0.0.1:1/schema.json"})},
        {"response_format": schema({"type": "integer", "minimum": 9e99, "maximum": -9e99})},
        {"response_format": schema({"enum": []})},
        {"response_format": schema({"allOf": [{"type": "string"}, {"type": "integer"}]})},
        {"response_format": schema({"type": "array", "minItems": 10**9})},
        {
            "tools": [{"type": "function", "function": {"name": "x", "parameters": {"type": 7}}}],
            "tool_choice": "required",
        },
        {"tools": [{"type": "function", "function": {"name": "x", "parameters": {"type": "nonsense"}}}]},
        {"logit_bias": {"999999": 5.0}},
    ],
)
async def test_invalid_schemas_are_refused_or_survived(
    engine_client: EngineClient, make_call: MakeCall, fields: dict[str, Any]
) -> None:
    with pytest.raises(EngineRefused) as refused:
        await engine_client.complete(make_call(max_tokens=4, **fields))
        raise EngineRefused(400, "the engine accepted the request")
    assert refused.value.status == 400
    assert await engine_client.can_generate()


async def test_rendered_prompt_can_be_sent_as_tokens(engine_client: EngineClient, make_call: MakeCall) -> None:
    call = make_call("Do you repair tyres?", max_tokens=8)
    ids = await engine_client.tokenize(call)
    assert (await engine_client.complete(call)).capture.prompt_ids == ids
    again = make_call("Do you repair tyres?", max_tokens=8, prompt_ids=[*ids[:-3], *ids[-3:]])
    assert (await engine_client.complete(again)).capture.prompt_ids == ids
    shorter = await engine_client.tokenize(call, add_generation_prompt=False)
    assert ids[: len(shorter)] == shorter and len(shorter) < len(ids)
    with pytest.raises((EngineRefused, EngineUnavailable)):
        await engine_client.tokenize(make_call(messages=[{"role": "user", "content": None}]))
