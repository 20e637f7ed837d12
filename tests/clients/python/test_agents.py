"""Feedback on runs of LangGraph and of the OpenAI Agents SDK."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import openai
import pytest
from agents import (
    Agent,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    RunConfig,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from attune_client import AsyncAttune, Attune
from attune_client.agents import agents_sdk_replies, langgraph_replies, rate_run
from attune_client.langchain import ChatAttune
from langchain_core.messages import HumanMessage
from langchain_core.tools import tool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition

from app.models import Feedback, Turn
from tests.support.deployment import Harness
from tests.support.scripted_engine import ScriptedEngine

CALL = ("order_status", '{"order_id": "4321"}')


def build_graph(model: ChatAttune, engine: ScriptedEngine) -> Any:
    """Return an agent with a tool; the engine calls it once and then answers."""

    @tool
    def order_status(order_id: str) -> str:
        """Look up the state of an order."""
        engine.tool_call = None
        return "shipped"

    graph = StateGraph(MessagesState)
    bound = model.bind_tools([order_status])
    graph.add_node("answer", lambda state: {"messages": [bound.invoke(state["messages"])]})
    graph.add_node("tools", ToolNode([order_status]))
    graph.add_edge(START, "answer")
    graph.add_conditional_edges("answer", tools_condition)
    graph.add_edge("tools", "answer")
    return graph.compile(checkpointer=InMemorySaver())


async def test_langgraph(client: Attune, url: str, harness: Harness, scripted: ScriptedEngine, tmp_path: Path) -> None:
    options: Any = {"base_url": f"{url}/v1", "api_key": harness.key}
    graph = build_graph(ChatAttune(model="shop", **options), scripted)
    config: Any = {"configurable": {"thread_id": "ada"}}
    for number in range(2):
        scripted.tool_call = CALL
        for _ in graph.stream({"messages": [HumanMessage("Where is my order?")]}, config, stream_mode="messages"):
            pass
        replies = langgraph_replies(graph.get_state(config))
        assert [bool(reply.tool_calls) for reply in replies] == [True, False], "those of this run alone"
        rate_run(client.feedback, replies, number == 0, source={"kind": "CODE", "id": "tests"}, id=f"run-{number}")
    with client.queue(tmp_path / "votes.db") as queue:
        rate_run(queue, langgraph_replies(graph.get_state(config).values), 0.25, name="accuracy")
    rows = await harness.all(Feedback)
    assert [row.value for row in rows] == [1, 1, -1, -1, 0.25, 0.25]
    assert {row.turn_id for row in rows} == {turn.id for turn in await harness.all(Turn)}
    assert [row.idempotency_key for row in rows[:4]] == ["run-0/0", "run-0/1", "run-1/0", "run-1/1"]


@pytest.mark.parametrize("model_class", [OpenAIResponsesModel, OpenAIChatCompletionsModel])
@pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "streamed"])
async def test_agents_sdk(
    url: str, harness: Harness, scripted: ScriptedEngine, model_class: Any, is_streamed: bool
) -> None:
    set_tracing_disabled(True)

    @function_tool(strict_mode=False)
    def order_status(order_id: str) -> str:
        """Look up the state of an order."""
        scripted.tool_call = None
        return "shipped"

    config = RunConfig(tracing_disabled=True)
    scripted.tool_call = CALL
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=harness.key) as model_client:
        agent = Agent(name="support", model=model_class("shop", model_client), tools=[order_status])
        result: Any
        if is_streamed:
            result = Runner.run_streamed(agent, "Where is my order?", run_config=config)
            async for _ in result.stream_events():
                pass
        else:
            result = await Runner.run(agent, "Where is my order?", run_config=config)
        async with AsyncAttune(url, harness.key) as client:
            await asyncio.gather(*rate_run(client.feedback, agents_sdk_replies(result), True))
    rows, turns = await harness.all(Feedback), await harness.all(Turn)
    assert {row.turn_id for row in rows} == {turn.id for turn in turns} and len(turns) == 2
    assert {row.value for row in rows} == {1.0}


def test_response_without_an_id() -> None:
    result = SimpleNamespace(raw_responses=[SimpleNamespace(response_id="__fake_id__", request_id=None)])
    with pytest.raises(ValueError, match="has no id"):
        agents_sdk_replies(result)
