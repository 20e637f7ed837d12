"""What the programs of the three generations of the `anthropic` package share."""

from typing import Any

from anthropic import Anthropic
from client_program import (
    API_KEY,
    BASE_URL,
    MAX_TOKENS,
    MODEL,
    NEXT_QUESTION,
    ORDER_QUESTION,
    ORDER_STATUS,
    QUESTION,
    SYSTEM,
    TEMPERATURE,
    Opening,
)

client = Anthropic(base_url=BASE_URL.removesuffix("/v1"), api_key=API_KEY, max_retries=0)
# From generation 1 on the typed methods take no temperature.
SAMPLING: Any = {"model": MODEL, "max_tokens": MAX_TOKENS, "extra_body": {"temperature": TEMPERATURE}}
MESSAGES: list[Any] = [{"role": "user", "content": QUESTION}]
REQUEST: Any = {"system": SYSTEM, "messages": MESSAGES, **SAMPLING}
FUNCTION = ORDER_STATUS["function"]
TOOL: Any = {
    "name": FUNCTION["name"],
    "description": FUNCTION["description"],
    "input_schema": FUNCTION["parameters"],
}


def text_of(reply: Any) -> str:
    return "".join(block.text for block in reply.content if block.type == "text")


def tools() -> dict[str, Any]:
    reply = client.messages.create(
        system=SYSTEM,
        messages=[{"role": "user", "content": ORDER_QUESTION}],
        tools=[TOOL],
        tool_choice={"type": "tool", "name": "order_status"},
        **SAMPLING,
    )
    [call] = [block for block in reply.content if block.type == "tool_use"]
    assert reply.stop_reason == "tool_use", reply.stop_reason
    return {"id": reply.id, "tool": {"name": call.name, "arguments": call.input}}


def structured() -> dict[str, Any]:
    reply = client.messages.parse(output_format=Opening, **REQUEST)
    return {"id": reply.id, "value": reply.parsed_output.model_dump()}


def multi_turn() -> dict[str, Any]:
    first = client.messages.create(**REQUEST)
    messages = [*MESSAGES, {"role": "assistant", "content": first.content}, {"role": "user", "content": NEXT_QUESTION}]
    reply = client.messages.create(**{**REQUEST, "messages": messages})
    return {"id": reply.id, "text": text_of(reply), "first_text": text_of(first)}
