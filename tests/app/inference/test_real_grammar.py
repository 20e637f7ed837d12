"""Grammar constraints on the real engine: obeyed, excluded from training, and safe with invalid schemas."""

import json
from typing import Any

import pytest

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


@both_modes
@with_retries
async def test_schema_is_obeyed_and_excluded(
    engine_client: EngineClient, make_call: MakeCall, get_capture: GetCapture
) -> None:
    capture = await get_capture(engine_client, make_call(response_format=schema(ORDER), max_tokens=64))
    parsed = json.loads(capture.text)
    assert set(parsed) == {"order", "ready"} and isinstance(parsed["order"], int) and isinstance(parsed["ready"], bool)
    assert len(capture.output_ids) == len(capture.logprobs) and "grammar" in (capture.exclusion_reason or "")


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "order_status"}}])
@both_modes
async def test_required_tool_is_called(
    engine_client: EngineClient, make_call: MakeCall, choice: Any, get_capture: GetCapture
) -> None:
    # The grammar of a call allows any white space, which a model this small may generate until the limit.
    for _ in range(8):
        capture = await get_capture(
            engine_client, make_call("My order?", tools=[TOOL], tool_choice=choice, max_tokens=300)
        )
        assert len(capture.output_ids) == len(capture.logprobs) and "grammar" in (capture.exclusion_reason or "")
        if capture.finish_reason == "tool_calls":
            break
    [tool_call] = capture.tool_calls
    assert tool_call["function"]["name"] == "order_status"
    assert set(json.loads(tool_call["function"]["arguments"])) == {"order", "ready"}


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
