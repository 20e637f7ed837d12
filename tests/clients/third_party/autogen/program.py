"""AutoGen's OpenAIChatCompletionClient, which loses the completion's id: metadata names the request."""

import json
from typing import Any

from autogen_core.models import AssistantMessage, ModelFamily, SystemMessage, UserMessage
from autogen_core.tools import FunctionTool
from autogen_ext.models.openai import OpenAIChatCompletionClient
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
    new_metadata,
    order_status,
    report,
)

INFO: Any = {"vision": False, "function_calling": True, "json_output": True, "family": ModelFamily.UNKNOWN}
INFO |= {"structured_output": True}
SAMPLING: Any = {"temperature": TEMPERATURE, "max_tokens": MAX_TOKENS}
client = OpenAIChatCompletionClient(model=MODEL, base_url=BASE_URL, api_key=API_KEY, model_info=INFO, **SAMPLING)
START: list[Any] = [SystemMessage(content=SYSTEM), UserMessage(content=QUESTION, source="user")]


async def create(messages: list[Any], **options: Any) -> tuple[Any, dict[str, Any]]:
    metadata = new_metadata()
    result = await client.create(messages, extra_create_args={"extra_body": {"metadata": metadata}}, **options)
    assert "chatcmpl-" not in str(result)
    return result.content, {"id": None, "metadata": metadata}


async def chat() -> dict[str, Any]:
    text, reference = await create(START)
    return reference | {"text": text}


async def stream() -> dict[str, Any]:
    metadata = new_metadata()
    extra: Any = {"extra_body": {"metadata": metadata}}
    parts: Any = [part async for part in client.create_stream(START, extra_create_args=extra)]
    pieces = sum(isinstance(part, str) for part in parts)
    return {"id": None, "metadata": metadata, "text": parts[-1].content, "pieces": pieces}


async def tools() -> dict[str, Any]:
    tool = FunctionTool(order_status, name="order_status", description="Look up the state of an order.")
    messages = [SystemMessage(content=SYSTEM), UserMessage(content=ORDER_QUESTION, source="user")]
    [call], reference = await create(messages, tools=[tool], tool_choice=tool)
    return reference | {"tool": {"name": call.name, "arguments": json.loads(call.arguments)}}


async def structured() -> dict[str, Any]:
    text, reference = await create(START, json_output=Opening)
    return reference | {"value": Opening.model_validate_json(text).model_dump()}


async def multi_turn() -> dict[str, Any]:
    first, _ = await create(START)
    next_messages = [AssistantMessage(content=first, source="shop"), UserMessage(content=NEXT_QUESTION, source="user")]
    text, reference = await create([*START, *next_messages])
    return reference | {"text": text, "first_text": first}


report(chat=chat, stream=stream, tools=tools, structured=structured, multi_turn=multi_turn)
