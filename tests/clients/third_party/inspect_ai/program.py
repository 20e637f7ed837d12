"""Inspect's model API over `openai-api`. `ModelOutput.response_id` is the completion's id."""

import os
from typing import Any

from client_program import (
    API_KEY,
    BASE_URL,
    MAX_TOKENS,
    MODEL,
    NEXT_QUESTION,
    ORDER_QUESTION,
    QUESTION,
    SYSTEM,
    TEMPERATURE,
    Opening,
    report,
)
from inspect_ai.model import ChatMessageSystem, ChatMessageUser, GenerateConfig, ResponseSchema, get_model
from inspect_ai.tool import Tool, ToolFunction, tool
from inspect_ai.util import json_schema

os.environ |= {"ATTUNE_API_KEY": API_KEY, "ATTUNE_BASE_URL": BASE_URL}
CONFIG = GenerateConfig(temperature=TEMPERATURE, max_tokens=MAX_TOKENS, max_retries=0)
model = get_model(f"openai-api/attune/{MODEL}", config=CONFIG)
START: list[Any] = [ChatMessageSystem(content=SYSTEM), ChatMessageUser(content=QUESTION)]


@tool
def order_status() -> Tool:
    async def execute(order_id: str) -> str:
        """Look up the state of an order.

        Args:
            order_id: The number of the order.
        """
        return "shipped"

    return execute


async def chat() -> dict[str, Any]:
    output = await model.generate(START)
    return {"id": output.response_id, "text": output.completion}


async def tools() -> dict[str, Any]:
    messages = [ChatMessageSystem(content=SYSTEM), ChatMessageUser(content=ORDER_QUESTION)]
    output = await model.generate(messages, tools=[order_status()], tool_choice=ToolFunction(name="order_status"))
    [call] = output.message.tool_calls or []
    return {"id": output.response_id, "tool": {"name": call.function, "arguments": call.arguments}}


async def structured() -> dict[str, Any]:
    schema = ResponseSchema(name="opening", json_schema=json_schema(Opening))
    output = await model.generate(START, config=GenerateConfig(response_schema=schema))
    return {"id": output.response_id, "value": Opening.model_validate_json(output.completion).model_dump()}


async def multi_turn() -> dict[str, Any]:
    first = await model.generate(START)
    output = await model.generate([*START, first.message, ChatMessageUser(content=NEXT_QUESTION)])
    return {"id": output.response_id, "text": output.completion, "first_text": first.completion}


report(chat=chat, tools=tools, structured=structured, multi_turn=multi_turn)
