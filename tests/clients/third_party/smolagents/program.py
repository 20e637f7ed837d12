"""smolagents' OpenAIModel. A whole reply keeps the completion in `raw`; a streamed one loses it."""

from typing import Any

from client_program import (
    API_KEY,
    BASE_URL,
    MAX_TOKENS,
    MESSAGES,
    MODEL,
    ORDER_MESSAGES,
    TEMPERATURE,
    Opening,
    continue_chat,
    new_metadata,
    report,
)
from smolagents import OpenAIModel, tool

model = OpenAIModel(MODEL, api_base=BASE_URL, api_key=API_KEY, temperature=TEMPERATURE, max_tokens=MAX_TOKENS)


@tool
def order_status(order_id: str) -> str:
    """Look up the state of an order.

    Args:
        order_id: The number of the order.
    """
    return "shipped"


def chat() -> dict[str, Any]:
    reply: Any = model.generate(MESSAGES)
    return {"id": reply.raw.id, "text": reply.content}


def stream() -> dict[str, Any]:
    metadata = new_metadata()
    parts = list(model.generate_stream(MESSAGES, extra_body={"metadata": metadata}))
    texts = [part.content for part in parts if part.content]
    return {"id": None, "metadata": metadata, "text": "".join(texts), "pieces": len(texts)}


def tools() -> dict[str, Any]:
    """smolagents requires a tool call, without naming one."""
    reply: Any = model.generate(ORDER_MESSAGES, tools_to_call_from=[order_status])
    [call] = reply.tool_calls
    return {"id": reply.raw.id, "tool": {"name": call.function.name, "arguments": call.function.arguments}}


def structured() -> dict[str, Any]:
    schema = {"name": "opening", "schema": Opening.model_json_schema(), "strict": True}
    form: Any = {"type": "json_schema", "json_schema": schema}
    reply: Any = model.generate(MESSAGES, response_format=form)
    return {"id": reply.raw.id, "value": Opening.model_validate_json(reply.content).model_dump()}


def multi_turn() -> dict[str, Any]:
    first: Any = model.generate(MESSAGES)
    reply: Any = model.generate(continue_chat(first.content))
    return {"id": reply.raw.id, "text": reply.content, "first_text": first.content}


report(chat=chat, stream=stream, tools=tools, structured=structured, multi_turn=multi_turn)
