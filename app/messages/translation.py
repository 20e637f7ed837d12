"""Translate a request of the Messages API into the equivalent chat request."""

import hashlib
from collections.abc import Iterable, Sequence

import orjson

from app.core.errors import UnsupportedParameter
from app.messages.schemas import (
    AssistantMessage,
    CountRequest,
    Message,
    MessagesRequest,
    NamedToolChoice,
    ServerTool,
    SystemMessage,
    TextBlock,
    ThinkingBlock,
    Tool,
    ToolResultBlock,
    ToolUseBlock,
    UserMessage,
)
from app.messages.thinking import to_reply_text

PARAGRAPH = "\n\n"  # between the texts of one message; a reply's own texts are joined as they were sampled
ERROR_PREFIX = "Error: "  # of a tool's result: chats have no field that says so
# Claude Code's accounting, another text for each of its releases: with it no two releases have the same prompt.
BILLING_HEADER = "x-anthropic-billing-header"
MAX_END_USER_CHARS = 64
TOOL_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
SCHEMA_NAME = "output"
ChatMessage = dict[str, object]


def to_chat_body(request: CountRequest, *, takes_late_system: bool = True) -> dict[str, object]:
    """Return the body of the equivalent chat request.

    `takes_late_system`: the model's chat template takes a system message behind other messages. Raises
    UnsupportedParameter if a server tool is forced.
    """
    tools = [tool for tool in request.tools or () if isinstance(tool, Tool)]
    body: dict[str, object] = {
        "model": request.model,
        "messages": to_chat_messages(request.system, request.messages, takes_late_system=takes_late_system),
        "tools": [_to_chat_tool(tool) for tool in tools] or None,
        "tool_choice": _to_chat_choice(request, has_tools=bool(tools)),
    }
    if request.tool_choice is not None and request.tool_choice.disable_parallel_tool_use and tools:
        body["parallel_tool_calls"] = False
    if (schema := request.response_schema) is not None:
        json_schema = {"name": SCHEMA_NAME, "schema": schema, "strict": True}
        body["response_format"] = {"type": "json_schema", "json_schema": json_schema}
    if isinstance(request, MessagesRequest):
        body |= _to_chat_params(request)
    return {name: value for name, value in body.items() if value is not None}


def _to_chat_params(request: MessagesRequest) -> dict[str, object]:
    """Return the parameters that change the reply and not its prompt."""
    metadata = {name: value for name, value in (request.metadata or {}).items() if value is not None}
    params: dict[str, object] = {
        "max_completion_tokens": request.max_tokens,
        "temperature": request.temperature,
        "top_p": request.top_p,
        "stop": request.stop_sequences or None,
        "user": to_end_user(metadata.pop("user_id", None)),
        "metadata": metadata or None,
    }
    return params | ({"stream": True, "stream_options": {"include_usage": True}} if request.stream else {})


def to_end_user(user_id: str | None) -> str | None:
    """Return the end user; a long id, such as Claude Code's JSON object, becomes its SHA-256 in hexadecimal."""
    if user_id is None or len(user_id) <= MAX_END_USER_CHARS:
        return user_id or None
    return hashlib.sha256(user_id.encode()).hexdigest()


def _to_chat_tool(tool: Tool) -> dict[str, object]:
    function: dict[str, object] = {"name": tool.name, "parameters": tool.input_schema}
    optional = {"description": tool.description, "strict": tool.strict}
    function |= {name: value for name, value in optional.items() if value is not None}
    return {"type": "function", "function": function}


def _to_chat_choice(request: CountRequest, *, has_tools: bool) -> object:
    choice = request.tool_choice
    if choice is None:
        return None
    if not isinstance(choice, NamedToolChoice):
        return TOOL_CHOICES[choice.type] if has_tools or choice.type == "any" else None
    if any(isinstance(tool, ServerTool) and tool.name == choice.name for tool in request.tools or ()):
        error = f"tool_choice.name: '{choice.name}' is a server tool, which does not exist here: define a tool of your "
        raise UnsupportedParameter(f"{error}own, with its input_schema.", param="tool_choice.name")
    return {"type": "function", "function": {"name": choice.name}}


def to_chat_messages(
    system: Sequence[TextBlock] | None, messages: Sequence[Message], *, takes_late_system: bool = True
) -> list[ChatMessage]:
    """Return the chat messages.

    System messages before any other are one with `system`. So are later ones if the chat template takes none there;
    otherwise they stay in their places, where they leave the beginning of the prompt alone.
    """
    leading = _system_texts(system or ())
    chat: list[ChatMessage] = []
    for message in messages:
        if isinstance(message, SystemMessage):
            texts = _system_texts(message.content)
            if not chat or not takes_late_system:
                leading += texts
            elif texts:
                chat.append({"role": "system", "content": PARAGRAPH.join(texts)})
        elif isinstance(message, UserMessage):
            chat += _user_messages(message.content)
        else:
            chat.append(_assistant_message(message))
    return [{"role": "system", "content": PARAGRAPH.join(leading)}, *chat] if leading else chat


def has_late_system(messages: Sequence[Message]) -> bool:
    """Return whether a system message stands behind another one."""
    late = False
    for message in messages:
        if isinstance(message, SystemMessage) and late:
            return True
        late = late or not isinstance(message, SystemMessage)
    return False


def _system_texts(blocks: Iterable[TextBlock]) -> list[str]:
    return [block.text for block in blocks if block.text and not block.text.startswith(BILLING_HEADER)]


def _user_messages(blocks: Sequence[TextBlock | ToolResultBlock]) -> list[ChatMessage]:
    """Return the user's texts and the tools' results in their order: neighbouring texts are one message."""
    chat: list[ChatMessage] = []
    for block in blocks:
        if isinstance(block, ToolResultBlock):
            text = PARAGRAPH.join(part.text for part in block.content or ())
            content = ERROR_PREFIX + text if block.is_error else text
            chat.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": content})
        elif chat and chat[-1]["role"] == "user":
            chat[-1]["content"] = f"{chat[-1]['content']}{PARAGRAPH}{block.text}"
        else:
            chat.append({"role": "user", "content": block.text})
    return chat


def _assistant_message(message: AssistantMessage) -> ChatMessage:
    """Return a reply as it was recorded, so that its message has the same hash and its tokens can be used again."""
    text, calls = "", []
    for block in message.content:
        if isinstance(block, TextBlock):
            text += block.text
        elif isinstance(block, ThinkingBlock):
            text += "" if block.signature else to_reply_text(block.thinking)
        elif isinstance(block, ToolUseBlock):
            function = {"name": block.name, "arguments": orjson.dumps(block.input).decode()}
            calls.append({"id": block.id, "type": "function", "function": function})
    return {"role": "assistant", "content": text or None, "tool_calls": calls} if calls else _text_message(text)


def _text_message(text: str) -> ChatMessage:
    return {"role": "assistant", "content": text}
