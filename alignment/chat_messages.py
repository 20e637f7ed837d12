"""Messages of a chat in OpenAI's format, as plain dicts."""

from collections.abc import Mapping
from typing import NotRequired, TypedDict

from alignment.json_values import as_object, as_objects, as_text


class FunctionCall(TypedDict):
    """`arguments` is JSON as the model wrote it, valid or not."""

    name: str
    arguments: str


class ToolCall(TypedDict):
    id: str
    type: str
    function: FunctionCall


def openai_tool_call(tool_call: ToolCall) -> ToolCall:
    """Return a tool call without what engines add to it, such as an index in whole replies."""
    function = tool_call["function"]
    return {
        "id": tool_call["id"],
        "type": "function",
        "function": {"name": function["name"], "arguments": function["arguments"]},
    }


class AssistantMessage(TypedDict):
    """A reply. `content` is None beside tool calls if there is no text."""

    role: str
    content: str | None
    tool_calls: NotRequired[list[ToolCall]]
    refusal: NotRequired[str | None]


def function_calls(message: Mapping[str, object]) -> list[FunctionCall]:
    """Return the calls of any message, empty for one without. Raises ValueError or KeyError for a malformed one."""
    functions = [as_object(call["function"]) for call in as_objects(message.get("tool_calls") or [])]
    return [{"name": as_text(function["name"]), "arguments": as_text(function["arguments"])} for function in functions]
