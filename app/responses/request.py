"""Asking: a Responses request as the chat request that means the same."""

from collections.abc import Sequence
from typing import Any

from app.responses.items import FunctionCall, InputItem, Message
from app.responses.schemas import Function, JsonSchema, Named, ResponsesRequest

SAME = ("model", "temperature", "top_p", "parallel_tool_calls", "metadata", "user", "safety_identifier")


def chat_body(asked: ResponsesRequest) -> dict[str, Any]:
    body = {name: value for name in SAME if (value := getattr(asked, name)) is not None}
    body["messages"] = messages(asked.instructions, asked.input)
    if asked.max_output_tokens is not None:
        body["max_completion_tokens"] = asked.max_output_tokens
    if asked.tools:
        body["tools"] = [_tool(tool) for tool in asked.tools]
    if asked.tool_choice is not None:
        body["tool_choice"] = _tool_choice(asked.tool_choice)
    if (wanted := _response_format(asked)) is not None:
        body["response_format"] = wanted
    if asked.shows_logprobs:
        body |= {"logprobs": True, "top_logprobs": asked.top_logprobs or 0}
    if asked.stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    return body


def messages(instructions: str | None, items: Sequence[InputItem]) -> list[dict[str, Any]]:
    """What the assistant said and the calls it made in the same turn are one message, as they were when they left."""
    said: list[dict[str, Any]] = [{"role": "system", "content": instructions}] if instructions else []
    for item in items:
        if isinstance(item, Message):
            said.append({"role": item.role, "content": "".join(part.text for part in item.content)})
        elif isinstance(item, FunctionCall):
            if not (said and said[-1]["role"] == "assistant"):
                said.append({"role": "assistant", "content": None})
            said[-1].setdefault("tool_calls", []).append(_call(item))
        else:
            output = "".join(part.text for part in item.output)
            said.append({"role": "tool", "tool_call_id": item.call_id, "content": output})
    return said


def _call(item: FunctionCall) -> dict[str, Any]:
    return {"id": item.call_id, "type": "function", "function": {"name": item.name, "arguments": item.arguments}}


def _tool(tool: Function) -> dict[str, Any]:
    return {"type": "function", "function": tool.model_dump(exclude={"type"}, exclude_none=True)}


def _tool_choice(choice: str | Named) -> Any:
    return choice if isinstance(choice, str) else {"type": "function", "function": {"name": choice.name}}


def _response_format(asked: ResponsesRequest) -> dict[str, Any] | None:
    wanted = asked.text.format if asked.text else None
    if wanted is None or wanted.type == "text":
        return None
    if isinstance(wanted, JsonSchema):
        schema = wanted.model_dump(by_alias=True, exclude={"type"}, exclude_none=True)
        return {"type": "json_schema", "json_schema": schema}
    return {"type": wanted.type}
