"""LiteLLM's `completion` with an OpenAI-compatible endpoint."""

from typing import Any

import litellm
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
    report,
)

OPTIONS: Any = {"model": f"openai/{MODEL}", "api_base": BASE_URL, "api_key": API_KEY}
OPTIONS |= {"temperature": TEMPERATURE, "max_tokens": MAX_TOKENS}


def chat() -> dict[str, Any]:
    reply: Any = litellm.completion(messages=MESSAGES, **OPTIONS)
    return {"id": reply.id, "text": reply.choices[0].message.content}


def stream() -> dict[str, Any]:
    chunks: Any = list(litellm.completion(messages=MESSAGES, stream=True, **OPTIONS))
    texts = [chunk.choices[0].delta.content for chunk in chunks if chunk.choices and chunk.choices[0].delta.content]
    return {"id": chunks[0].id, "text": "".join(texts), "pieces": len(texts)}


def tools() -> dict[str, Any]:
    choice = {"type": "function", "function": {"name": "order_status"}}
    reply: Any = litellm.completion(messages=ORDER_MESSAGES, tools=[ORDER_STATUS], tool_choice=choice, **OPTIONS)
    [call] = reply.choices[0].message.tool_calls
    return {"id": reply.id, "tool": {"name": call.function.name, "arguments": call.function.arguments}}


def structured() -> dict[str, Any]:
    reply: Any = litellm.completion(messages=MESSAGES, response_format=Opening, **OPTIONS)
    opening = Opening.model_validate_json(reply.choices[0].message.content)
    return {"id": reply.id, "value": opening.model_dump()}


def multi_turn() -> dict[str, Any]:
    first: Any = litellm.completion(messages=MESSAGES, **OPTIONS)
    text = first.choices[0].message.content
    reply: Any = litellm.completion(messages=continue_chat(text), **OPTIONS)
    return {"id": reply.id, "text": reply.choices[0].message.content, "first_text": text}


report(chat=chat, stream=stream, tools=tools, structured=structured, multi_turn=multi_turn)
