"""The OpenAI Agents SDK, with either of its two model classes."""

from collections.abc import Callable
from typing import Any
from uuid import uuid4

from agents import Agent, ModelSettings, Runner, function_tool, set_tracing_disabled
from client_program import (
    MAX_TOKENS,
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

set_tracing_disabled(True)


def report_agent(model: Any, *, keeps_id: bool) -> None:
    """`keeps_id`: whether the class shows the completion's id; otherwise metadata names the request."""

    def build_agent(**options: Any) -> tuple[Agent[Any], dict[str, str]]:
        metadata = new_metadata()
        choice = options.pop("tool_choice", None)
        settings = ModelSettings(temperature=TEMPERATURE, max_tokens=MAX_TOKENS, tool_choice=choice)
        if not keeps_id:
            settings = settings.resolve(ModelSettings(metadata=metadata))
        settings = settings.resolve(options.pop("settings", None))
        return Agent(name="support", instructions=SYSTEM, model=model, model_settings=settings, **options), metadata

    def describe(result: Any, metadata: dict[str, str]) -> dict[str, Any]:
        id = result.raw_responses[-1].response_id
        assert str(id).startswith(("chatcmpl-", "resp_")) == keeps_id, id
        return {"id": id} if keeps_id else {"id": None, "metadata": metadata}

    async def chat() -> dict[str, Any]:
        agent, metadata = build_agent()
        result = await Runner.run(agent, QUESTION)
        return describe(result, metadata) | {"text": result.final_output}

    async def stream() -> dict[str, Any]:
        agent, metadata = build_agent()
        result = Runner.run_streamed(agent, QUESTION)
        texts = [
            event.data.delta
            async for event in result.stream_events()
            if event.type == "raw_response_event" and event.data.type == "response.output_text.delta"
        ]
        return describe(result, metadata) | {"text": "".join(texts), "pieces": len(texts)}

    async def tools() -> dict[str, Any]:
        tool = function_tool(order_status, strict_mode=False)
        behavior = {"tool_choice": "order_status", "tool_use_behavior": "stop_on_first_tool"}
        agent, metadata = build_agent(tools=[tool], **behavior)
        result = await Runner.run(agent, ORDER_QUESTION)
        [call] = [item.raw_item for item in result.new_items if item.type == "tool_call_item"]
        assert "shipped" in str(result.final_output)
        return describe(result, metadata) | {"tool": {"name": call.name, "arguments": call.arguments}}

    async def structured() -> dict[str, Any]:
        agent, metadata = build_agent(output_type=Opening)
        result = await Runner.run(agent, QUESTION)
        return describe(result, metadata) | {"value": result.final_output.model_dump()}

    async def multi_turn() -> dict[str, Any]:
        """A conversation that the program names, so that feedback can name its turns by their numbers."""
        conversation = uuid4().hex
        settings = ModelSettings(extra_headers={"x-conversation-id": conversation})
        agent, metadata = build_agent(settings=settings)
        first = await Runner.run(agent, QUESTION)
        agent, metadata = build_agent(settings=settings)
        next_input = [*first.to_input_list(), {"role": "user", "content": NEXT_QUESTION}]
        result = await Runner.run(agent, next_input)
        described = describe(result, metadata) | {"target": {"conversation_id": conversation, "turn": 2}}
        return described | {"text": result.final_output, "first_text": first.final_output}

    capabilities: dict[str, Callable[[], Any]] = {"chat": chat, "stream": stream, "tools": tools}
    report(**capabilities, structured=structured, multi_turn=multi_turn)
