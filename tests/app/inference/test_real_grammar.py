"""Grammar constraints on the real engine: obeyed, excluded from training, and safe with invalid schemas."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from app.inference.engine import EngineClient
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
NAMED = {"type": "function", "function": {"name": "order_status"}}
HOURS = {"type": "function", "function": {"name": "opening_hours", "description": "Look the hours up."}}
INEXPRESSIBLE: list[dict[str, Any]] = [
    {"type": "string", "pattern": "^(?!draft).*$"},
    {"type": "string", "pattern": "(?i)order"},
    {"type": "string", "pattern": "\\border\\b"},
    {"$ref": "#/$defs/nowhere"},
    {"type": "array", "items": {"type": "integer"}, "minItems": 3, "maxItems": 1},
]


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


def odd_tool(part: dict[str, Any], *, strict: bool | None = None) -> dict[str, Any]:
    function = {"name": "order_status", "parameters": {"type": "object", "properties": {"order": part}}}
    return {"type": "function", "function": function | ({} if strict is None else {"strict": strict})}


@pytest.mark.parametrize("part", INEXPRESSIBLE, ids=str)
async def test_schema_that_no_grammar_expresses_is_a_guide_unless_strict(
    engine_client: EngineClient, make_call: MakeCall, part: dict[str, Any]
) -> None:
    """Whatever `tool_choice` and response format: the arguments are then any JSON object."""
    for choice in ("required", NAMED):
        call = make_call(tools=[odd_tool(part), HOURS], tool_choice=choice, max_tokens=200)
        for tool_call in (await engine_client.complete(call)).capture.tool_calls:
            text = tool_call["function"]["arguments"]
            assert text.startswith("{")
    with_format = make_call(tools=[odd_tool(part)], response_format=schema(ORDER), max_tokens=40)
    assert (await engine_client.complete(with_format)).capture.output_ids
    assert (await engine_client.complete(make_call(tools=[odd_tool(part)], max_tokens=4))).capture.output_ids
    with pytest.raises(EngineRefused):
        await engine_client.complete(make_call(tools=[odd_tool(part, strict=True)], tool_choice="required"))


@both_modes
async def test_prompt_is_the_same_with_every_tool_choice(
    engine_client: EngineClient, make_call: MakeCall, get_capture: GetCapture
) -> None:
    prompts = []
    for choice in (None, "auto", "none", "required", NAMED):
        call = make_call("My order?", tools=[TOOL, HOURS], tool_choice=choice, max_tokens=2)
        prompts.append((await get_capture(engine_client, call)).prompt_ids)
        assert await engine_client.tokenize(call) == prompts[0]
    assert all(prompt == prompts[0] for prompt in prompts)
    without_tools = await get_capture(engine_client, make_call("My order?", max_tokens=2))
    assert len(without_tools.prompt_ids) < len(prompts[0])


@both_modes
async def test_forbidden_tools_are_not_called(
    engine_client: EngineClient, make_call: MakeCall, get_capture: GetCapture, tokenizer: Tokenizer
) -> None:
    call_token = tokenizer.encode("<tool_call>", add_special_tokens=False).ids[0]
    bias = {str(call_token): 50.0}  # towards a call
    fields: dict[str, Any] = {"tools": [TOOL], "logit_bias": bias, "max_tokens": 24}
    called = await get_capture(engine_client, make_call("My order?", tool_choice="auto", **fields))
    assert call_token in called.output_ids
    forbidden = await get_capture(engine_client, make_call("My order?", tool_choice="none", **fields))
    assert call_token not in forbidden.output_ids and not forbidden.tool_calls
    assert "<tool_call>" not in forbidden.text and "grammar" in (forbidden.exclusion_reason or "")


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
