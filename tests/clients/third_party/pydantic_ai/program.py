"""Pydantic AI: agents on OpenAIChatModel. `provider_response_id` is the completion's id."""

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
    order_status,
    report,
)
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.messages import ModelResponse, ToolCallPart
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

model = OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=BASE_URL, api_key=API_KEY))
SETTINGS: Any = {"temperature": TEMPERATURE, "max_tokens": MAX_TOKENS}


def build_agent(**options: Any) -> Agent[Any, Any]:
    return Agent(model, system_prompt=SYSTEM, model_settings=SETTINGS, **options)


def first_response(result: Any) -> ModelResponse:
    return next(message for message in result.all_messages() if isinstance(message, ModelResponse))


async def chat() -> dict[str, Any]:
    result = await build_agent().run(QUESTION)
    return {"id": result.response.provider_response_id, "text": result.output}


async def stream() -> dict[str, Any]:
    async with build_agent().run_stream(QUESTION) as result:
        texts = [text async for text in result.stream_text(delta=True, debounce_by=None)]
        return {"id": result.response.provider_response_id, "text": "".join(texts), "pieces": len(texts)}


async def tools() -> dict[str, Any]:
    """The output is a tool of the name that the model knows, whose call is required."""
    result = await build_agent(output_type=ToolOutput(order_status, name="order_status")).run(ORDER_QUESTION)
    response = first_response(result)
    [call] = [part for part in response.parts if isinstance(part, ToolCallPart)]
    assert "shipped" in result.output
    return {"id": response.provider_response_id, "tool": {"name": call.tool_name, "arguments": call.args_as_dict()}}


async def structured() -> dict[str, Any]:
    result = await build_agent(output_type=NativeOutput(Opening)).run(QUESTION)
    return {"id": first_response(result).provider_response_id, "value": result.output.model_dump()}


async def multi_turn() -> dict[str, Any]:
    agent = build_agent()
    first = await agent.run(QUESTION)
    result = await agent.run(NEXT_QUESTION, message_history=first.all_messages())
    return {"id": result.response.provider_response_id, "text": result.output, "first_text": first.output}


report(chat=chat, stream=stream, tools=tools, structured=structured, multi_turn=multi_turn)
