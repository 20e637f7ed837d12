"""Haystack's OpenAIChatGenerator, which loses the completion's id: metadata names the request."""

from typing import Any

from client_program import (
    API_KEY,
    BASE_URL,
    MAX_TOKENS,
    MESSAGES,
    MODEL,
    ORDER_MESSAGES,
    ORDER_STATUS,
    TEMPERATURE,
    Opening,
    continue_chat,
    new_metadata,
    order_status,
    report,
)
from haystack.components.generators.chat import OpenAIChatGenerator
from haystack.dataclasses import ChatMessage
from haystack.tools import Tool
from haystack.utils import Secret


def run(messages: list[dict[str, Any]], callback: Any = None, **options: Any) -> tuple[ChatMessage, dict[str, Any]]:
    tools = options.pop("tools", None)
    metadata = new_metadata()
    sampling = {"temperature": TEMPERATURE, "max_tokens": MAX_TOKENS, "extra_body": {"metadata": metadata}}
    generator = OpenAIChatGenerator(
        model=MODEL,
        api_base_url=BASE_URL,
        api_key=Secret.from_token(API_KEY),
        generation_kwargs=sampling | options,
        streaming_callback=callback,
        tools=tools,
    )
    [reply] = generator.run([ChatMessage.from_openai_dict_format(message) for message in messages])["replies"]
    assert "chatcmpl-" not in str(reply.meta)
    return reply, {"id": None, "metadata": metadata}


def chat() -> dict[str, Any]:
    reply, reference = run(MESSAGES)
    return reference | {"text": reply.text}


def stream() -> dict[str, Any]:
    chunks: list[Any] = []
    reply, reference = run(MESSAGES, chunks.append)
    return reference | {"text": reply.text, "pieces": sum(bool(chunk.content) for chunk in chunks)}


def tools() -> dict[str, Any]:
    function = ORDER_STATUS["function"]
    tool = Tool(function["name"], function["description"], function["parameters"], function=order_status)
    choice = {"type": "function", "function": {"name": "order_status"}}
    reply, reference = run(ORDER_MESSAGES, tools=[tool], tool_choice=choice)
    [call] = reply.tool_calls
    return reference | {"tool": {"name": call.tool_name, "arguments": call.arguments}}


def structured() -> dict[str, Any]:
    reply, reference = run(MESSAGES, response_format=Opening)
    return reference | {"value": Opening.model_validate_json(reply.text or "").model_dump()}


def multi_turn() -> dict[str, Any]:
    first, _ = run(MESSAGES)
    reply, reference = run(continue_chat(first.text or ""))
    return reference | {"text": reply.text, "first_text": first.text}


report(chat=chat, stream=stream, tools=tools, structured=structured, multi_turn=multi_turn)
