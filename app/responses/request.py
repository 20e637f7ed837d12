"""Translate a Responses request into the equivalent chat request."""

from collections.abc import Sequence
from typing import Any

from app.responses.schemas import (
    FunctionCall,
    FunctionTool,
    InputItem,
    JsonSchemaFormat,
    Message,
    NamedToolChoice,
    ResponsesRequest,
)

COPIED_FIELDS = ("model", "temperature", "top_p", "parallel_tool_calls", "metadata", "user", "safety_identifier")


def to_chat_body(request: ResponsesRequest) -> dict[str, Any]:
    body = {name: value for name in COPIED_FIELDS if (value := getattr(request, name)) is not None}
    body["messages"] = to_chat_messages(request.instructions, request.input)
    if request.max_output_tokens is not None:
        body["max_completion_tokens"] = request.max_output_tokens
    if request.tools:
        body["tools"] = [_tool(tool) for tool in request.tools]
    if request.tool_choice is not None:
        body["tool_choice"] = _tool_choice(request.tool_choice)
    if (response_format := _response_format(request)) is not None:
        body["response_format"] = response_format
    if request.include_logprobs:
        body |= {"logprobs": True, "top_logprobs": request.top_logprobs or 0}
    if request.stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    return body


def to_chat_messages(instructions: str | None, items: Sequence[InputItem]) -> list[dict[str, Any]]:
    """Return the chat messages. An assistant's text and the tool calls that follow it become one message."""
    chat_messages: list[dict[str, Any]] = [{"role": "system", "content": instructions}] if instructions else []
    for item in items:
        if isinstance(item, Message):
            chat_messages.append({"role": item.role, "content": "".join(part.text for part in item.content)})
        elif isinstance(item, FunctionCall):
            if not (chat_messages and chat_messages[-1]["role"] == "assistant"):
                chat_messages.append({"role": "assistant", "content": None})
            chat_messages[-1].setdefault("tool_calls", []).append(_tool_call(item))
        else:
            output = "".join(part.text for part in item.output)
            chat_messages.append({"role": "tool", "tool_call_id": item.call_id, "content": output})
    return chat_messages


def _tool_call(item: FunctionCall) -> dict[str, Any]:
    return {"id": item.call_id, "type": "function", "function": {"name": item.name, "arguments": item.arguments}}


def _tool(tool: FunctionTool) -> dict[str, Any]:
    return {"type": "function", "function": tool.model_dump(exclude={"type"}, exclude_none=True)}


def _tool_choice(choice: str | NamedToolChoice) -> Any:
    return choice if isinstance(choice, str) else {"type": "function", "function": {"name": choice.name}}


def _response_format(request: ResponsesRequest) -> dict[str, Any] | None:
    text_format = request.text.format if request.text else None
    if text_format is None or text_format.type == "text":
        return None
    if isinstance(text_format, JsonSchemaFormat):
        schema = text_format.model_dump(by_alias=True, exclude={"type"}, exclude_none=True)
        return {"type": "json_schema", "json_schema": schema}
    return {"type": text_format.type}
