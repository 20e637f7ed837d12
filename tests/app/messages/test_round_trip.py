"""Property: a request that is translated into a chat and back has lost nothing that docs/messages.md says is kept.

The way back is written here, from the documented rules alone. What those rules drop or join is dropped and joined in
the request beforehand (`normalize`), and nothing else.
"""

import json
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from app.chat.schemas import parse_chat_request
from app.messages.events import render_message
from app.messages.schemas import parse_messages_request
from app.messages.translation import to_chat_body

Block = dict[str, Any]
NAMES = st.sampled_from(["weather", "order_status", "Bash", "mcp__shop__find"])
IDS = st.from_regex(r"(call|toolu)_[0-9a-zA-Z]{1,8}", fullmatch=True)
TEXTS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1, max_size=12)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=5,
)
CACHE_MARKS = st.sampled_from([{}, {"cache_control": {"type": "ephemeral"}}])


@st.composite
def text_blocks(draw: Any, texts: Any = TEXTS) -> Block:
    return {"type": "text", "text": draw(texts), **draw(CACHE_MARKS)}


@st.composite
def tool_uses(draw: Any) -> Block:
    input = draw(st.dictionaries(TEXTS, JSON, max_size=3))
    return {"type": "tool_use", "id": draw(IDS), "name": draw(NAMES), "input": input}


@st.composite
def tool_results(draw: Any) -> Block:
    content = draw(st.none() | TEXTS | st.lists(text_blocks(), max_size=2))
    return {"type": "tool_result", "tool_use_id": draw(IDS), "content": content, "is_error": draw(st.booleans())}


THINKING = st.builds(
    lambda text, signature: {"type": "thinking", "thinking": text, "signature": signature},
    TEXTS.filter(lambda text: "<" not in text),
    st.sampled_from(["", "EqQBCkYIBBgC"]),
)
REDACTED = st.just({"type": "redacted_thinking", "data": "EmwKAhgB"})
# What a reply of this service looks like: thinking, text, calls. Another service's blocks may stand before.
ASSISTANT = st.builds(
    lambda foreign, thinking, text, calls: {
        "role": "assistant",
        "content": [*foreign, *thinking, *text, *calls],
    },
    st.lists(REDACTED, max_size=1),
    st.lists(THINKING, max_size=1),
    st.lists(text_blocks(TEXTS.filter(lambda text: not text.startswith(("\n", "<")))), max_size=1),
    st.lists(tool_uses(), max_size=2),
)
USER = st.builds(
    lambda blocks: {"role": "user", "content": blocks},
    TEXTS | st.lists(text_blocks() | tool_results(), min_size=1, max_size=4),
)
SYSTEM = st.builds(lambda text: {"role": "system", "content": text}, TEXTS | st.lists(text_blocks(), max_size=2))
TOOLS = st.lists(NAMES, unique=True, min_size=1, max_size=3).map(
    lambda names: [{"name": name, "description": f"{name}!", "input_schema": {"type": "object"}} for name in names]
)
OPTIONAL = st.fixed_dictionaries(
    {},
    optional={
        "system": TEXTS | st.lists(text_blocks(), max_size=2),
        "temperature": st.floats(0, 1),
        "top_p": st.floats(0.1, 1),
        "stop_sequences": st.lists(TEXTS, max_size=4),
        "metadata": st.fixed_dictionaries({"user_id": st.text("abc-", min_size=1, max_size=64)}),
        "tools": TOOLS,
        "stream": st.booleans(),
    },
)
REQUESTS = st.builds(
    lambda first, others, last, optional: {
        "model": "shop",
        "max_tokens": 9,
        "messages": [first, *others, last],
        **optional,
    },
    USER,
    st.lists(USER | ASSISTANT | SYSTEM, max_size=4),
    USER,
    OPTIONAL,
)


def texts_of(content: Any) -> list[str]:
    """Return the texts of a content of text blocks."""
    return [content] if isinstance(content, str) else [block["text"] for block in content or ()]


def normalize(request: dict[str, Any]) -> dict[str, Any]:
    """Return the request after what the documentation says is dropped or joined."""
    messages: list[dict[str, Any]] = []
    for message in request["messages"]:
        blocks = message["content"]
        blocks = [{"type": "text", "text": blocks}] if isinstance(blocks, str) else blocks
        if message["role"] == "system":
            if text := "\n\n".join(texts_of(blocks)):
                messages.append({"role": "system", "content": text})
        elif message["role"] == "user":
            messages += normalize_user(blocks)
        else:
            content: list[Block] = []
            for block in blocks:
                if block["type"] == "text":
                    content.append({"type": "text", "text": block["text"]})
                elif block["type"] == "tool_use" or (block["type"] == "thinking" and not block["signature"]):
                    content.append(block)
            messages.append({"role": "assistant", "content": content or [{"type": "text", "text": ""}]})
    return {
        "messages": messages,
        "system": "\n\n".join(texts_of(request.get("system"))),
        "tools": request.get("tools") or [],
        "max_tokens": request["max_tokens"],
        "stop_sequences": request.get("stop_sequences") or [],
        "user_id": request.get("metadata", {}).get("user_id"),
        "stream": request.get("stream", False),
        **{name: request.get(name, 1.0) for name in ("temperature", "top_p")},
    }


def normalize_user(blocks: list[Block]) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    follows_text = False
    for block in blocks:
        if block["type"] == "text" and follows_text:
            messages[-1]["content"] += "\n\n" + block["text"]
        elif block["type"] == "text":
            messages.append({"role": "user", "content": block["text"]})
        else:
            error = "Error: " if block["is_error"] else ""
            messages.append({
                "role": "result",
                "id": block["tool_use_id"],
                "content": error + "\n\n".join(texts_of(block["content"])),
            })  # fmt: skip
        follows_text = block["type"] == "text"
    return messages


def translate_back(body: dict[str, Any]) -> dict[str, Any]:
    """Return what the chat request says, in the terms of the Messages API; replies as this service renders them."""
    chat = parse_chat_request(body)
    messages, system = list(chat.messages), ""
    if messages[0].role == "system":
        system = messages.pop(0).text
    back: list[dict[str, Any]] = []
    for message in messages:
        if message.role == "tool":
            back.append({"role": "result", "id": message.tool_call_id, "content": message.text})
        elif message.role == "assistant":
            reply = message.to_template_message()
            choice = {"message": reply, "delta": {}, "finish_reason": "stop"}
            usage = {"prompt_tokens": 1, "completion_tokens": 1}
            completion = {"id": "chatcmpl-1", "model": "shop", "choices": [choice], "usage": usage}
            back.append({"role": "assistant", "content": render_message(completion, None)["content"]})
        else:
            back.append({"role": message.role, "content": message.text})
    tools = [tool.function for tool in chat.tools or ()]
    return {
        "messages": back,
        "system": system,
        "tools": [
            {"name": tool.name, "description": tool.description, "input_schema": tool.parameters} for tool in tools
        ],
        "max_tokens": chat.max_output_tokens,
        "stop_sequences": list(chat.stop_strings),
        "user_id": chat.end_user,
        "stream": chat.stream,
        "temperature": chat.temperature,
        "top_p": chat.top_p,
    }


@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(REQUESTS)
def test_nothing_that_is_claimed_is_lost(request: dict[str, Any]) -> None:
    body = to_chat_body(parse_messages_request(request))
    back, expected = translate_back(body), normalize(request)
    assert json.dumps(back, sort_keys=True) == json.dumps(expected, sort_keys=True)
