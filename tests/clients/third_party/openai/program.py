"""The `openai` package, chat completions."""

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
    report,
)
from openai import OpenAI

client = OpenAI(base_url=BASE_URL, api_key=API_KEY)
SAMPLING: Any = {"model": MODEL, "temperature": TEMPERATURE, "max_tokens": MAX_TOKENS}


def chat() -> dict[str, Any]:
    reply = client.chat.completions.create(messages=MESSAGES, **SAMPLING)
    return {"id": reply.id, "text": reply.choices[0].message.content}


def stream() -> dict[str, Any]:
    chunks = list(client.chat.completions.create(messages=MESSAGES, stream=True, **SAMPLING))
    texts = [choice.delta.content for chunk in chunks for choice in chunk.choices if choice.delta.content]
    return {"id": chunks[0].id, "text": "".join(texts), "pieces": len(texts)}


def tools() -> dict[str, Any]:
    choice: Any = {"type": "function", "function": {"name": "order_status"}}
    reply = client.chat.completions.create(
        messages=ORDER_MESSAGES, tools=[ORDER_STATUS], tool_choice=choice, **SAMPLING
    )
    [call] = reply.choices[0].message.tool_calls
    return {"id": reply.id, "tool": {"name": call.function.name, "arguments": call.function.arguments}}


def structured() -> dict[str, Any]:
    reply = client.chat.completions.parse(messages=MESSAGES, response_format=Opening, **SAMPLING)
    return {"id": reply.id, "value": reply.choices[0].message.parsed.model_dump()}


def multi_turn() -> dict[str, Any]:
    first = client.chat.completions.create(messages=MESSAGES, **SAMPLING).choices[0].message.content
    reply = client.chat.completions.create(messages=continue_chat(first), **SAMPLING)
    return {"id": reply.id, "text": reply.choices[0].message.content, "first_text": first}


report(chat=chat, stream=stream, tools=tools, structured=structured, multi_turn=multi_turn)
