"""The OpenAI Agents SDK with its default model class, which uses the Responses API, streamed and not."""

from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
from agents import Agent, ModelSettings, OpenAIResponsesModel, RunConfig, Runner, function_tool, set_tracing_disabled
from agents.result import RunResultBase

from demo.dialogues import SYSTEM
from tests.clients.conftest import CONSTRAINED, Record, Running
from tests.clients.retries import with_retries

QUESTION = "Where is my order 4321?"
QUIET = RunConfig(tracing_disabled=True)


@function_tool(strict_mode=False)
def order_status(order_id: str) -> str:
    """Look up the state of an order."""
    return '{"state": "shipped"}'


@function_tool
def strict_status(order_id: str) -> str:
    """Look up the state of an order."""
    return '{"state": "shipped"}'


@pytest.fixture
async def model(attune: Running) -> AsyncIterator[OpenAIResponsesModel]:
    set_tracing_disabled(True)
    async with openai.AsyncOpenAI(base_url=attune.base_url, api_key=attune.key, max_retries=0, timeout=60) as client:
        yield OpenAIResponsesModel("shop", client)


def support(model: OpenAIResponsesModel, tool: Any, choice: str) -> Agent[Any]:
    """Return an agent. The SDK drops a required tool choice after the first call, so the model answers next."""
    settings = ModelSettings(temperature=0.3, max_tokens=120, tool_choice=choice)
    return Agent(name="support", instructions=SYSTEM, model=model, tools=[tool], model_settings=settings)


def assert_recorded(result: RunResultBase, record: Record, *, first_exclusion_reason: str | None) -> None:
    """Assert that every response of the run is a turn, and each one is the parent of the next."""
    assert len(result.raw_responses) >= 2 and isinstance(result.final_output, str)
    ids = [f"chatcmpl-{(response.response_id or '').removeprefix('resp_')}" for response in result.raw_responses]
    turns = [record.turn(id, exclusion_reason=None if at else first_exclusion_reason) for at, id in enumerate(ids)]
    assert turns[0].reply is not None and turns[0].reply["tool_calls"][0]["function"]["name"] == "order_status"
    assert turns[-1].reply is not None and turns[-1].reply["content"] == result.final_output
    assert [turn.parent_id for turn in turns[1:]] == [turn.id for turn in turns[:-1]]
    assert result.raw_responses[-1].usage.output_tokens == turns[-1].num_output_tokens


@with_retries
async def test_tool_loop_is_recorded(model: OpenAIResponsesModel, record: Record) -> None:
    result = await Runner.run(support(model, order_status, "order_status"), QUESTION, run_config=QUIET, max_turns=6)
    assert_recorded(result, record, first_exclusion_reason=CONSTRAINED)


@with_retries
async def test_streamed_tool_loop_is_recorded(model: OpenAIResponsesModel, record: Record) -> None:
    result = Runner.run_streamed(support(model, order_status, "order_status"), QUESTION, run_config=QUIET, max_turns=6)
    kinds = [event.data.type async for event in result.stream_events() if event.type == "raw_response_event"]
    assert {"response.function_call_arguments.delta", "response.output_text.delta", "response.completed"} <= set(kinds)
    assert_recorded(result, record, first_exclusion_reason=CONSTRAINED)


@with_retries
async def test_strict_tools_work_and_are_excluded(model: OpenAIResponsesModel, record: Record) -> None:
    result = await Runner.run(support(model, strict_status, "auto"), QUESTION, run_config=QUIET, max_turns=6)
    for response in result.raw_responses:
        record.turn("chatcmpl-" + (response.response_id or "").removeprefix("resp_"), exclusion_reason=CONSTRAINED)
