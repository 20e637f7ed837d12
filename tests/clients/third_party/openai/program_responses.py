"""The `openai` package, the Responses API."""

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
SAMPLING: Any = {"model": MODEL, "temperature": TEMPERATURE, "max_output_tokens": MAX_TOKENS}
TOOL: Any = {"type": "function", "strict": False, **ORDER_STATUS["function"]}


def chat() -> dict[str, Any]:
    reply = client.responses.create(input=MESSAGES, **SAMPLING)
    return {"id": reply.id, "text": reply.output_text}


def stream() -> dict[str, Any]:
    events = list(client.responses.create(input=MESSAGES, stream=True, **SAMPLING))
    texts = [event.delta for event in events if event.type == "response.output_text.delta"]
    return {"id": events[-1].response.id, "text": "".join(texts), "pieces": len(texts)}


def tools() -> dict[str, Any]:
    choice: Any = {"type": "function", "name": "order_status"}
    reply = client.responses.create(input=ORDER_MESSAGES, tools=[TOOL], tool_choice=choice, **SAMPLING)
    [call] = [item for item in reply.output if item.type == "function_call"]
    return {"id": reply.id, "tool": {"name": call.name, "arguments": call.arguments}}


def structured() -> dict[str, Any]:
    reply = client.responses.parse(input=MESSAGES, text_format=Opening, **SAMPLING)
    return {"id": reply.id, "value": reply.output_parsed.model_dump()}


def multi_turn() -> dict[str, Any]:
    first = client.responses.create(input=MESSAGES, **SAMPLING).output_text
    reply = client.responses.create(input=continue_chat(first), **SAMPLING)
    return {"id": reply.id, "text": reply.output_text, "first_text": first}


report(chat=chat, stream=stream, tools=tools, structured=structured, multi_turn=multi_turn)
