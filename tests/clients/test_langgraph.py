"""LangGraph: the example agent with the real engine, invoked and streamed, with feedback on each reply."""

import re
from typing import Any
from uuid import uuid4

import openai
import pytest
from attune_client.langchain import ChatAttune
from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage
from langchain_openai import ChatOpenAI

from app.models import Turn
from demo.shop import ORDERS
from examples import langgraph_agent as example
from tests.clients.conftest import CONSTRAINED, Record, Running
from tests.clients.retries import with_retries

REQUEST: Any = {"messages": [HumanMessage("Where is my order 4321?")]}


@pytest.fixture
def model(attune: Running) -> ChatAttune:
    options: Any = {"base_url": attune.base_url, "api_key": attune.key, "max_retries": 0}
    return ChatAttune(model="shop", max_completion_tokens=120, temperature=0.3, **options)


def thread(name: str) -> Any:
    return {"configurable": {"thread_id": name}, "recursion_limit": 8}


def replies_of(messages: list[Any]) -> list[AIMessage]:
    return [message for message in messages if isinstance(message, AIMessage)]


def assert_judged(model: ChatAttune, replies: list[AIMessage], record: Record) -> None:
    """Assert feedback on each reply: the first calls the tool, the last answers in the same conversation."""
    assert len(replies) >= 2
    assert [call["name"] for call in replies[0].tool_calls] == ["order_status"] and not replies[-1].tool_calls
    turns: list[Turn] = []
    for reply in replies:
        completion_id = reply.response_metadata["id"]
        model.feedback(reply, True, source={"kind": "CODE", "id": "test"})
        assert [row.source_id for row in record.feedback(completion_id)] == ["test"]
        turns.append(record.turn(completion_id, exclusion_reason=None if turns else CONSTRAINED))
    assert len({turn.id for turn in turns}) == len(turns)
    assert [turn.parent_id for turn in turns[1:]] == [turn.id for turn in turns[:-1]]
    assert turns[-1].reply is not None and turns[-1].reply["content"] == replies[-1].text


@with_retries
def test_feedback_on_invoked_agent(model: ChatAttune, record: Record) -> None:
    state = example.build_agent(model, force=True).invoke(REQUEST, thread("invoked"))
    assert_judged(model, replies_of(state["messages"]), record)


@with_retries
def test_feedback_on_agent_streamed_by_steps(model: ChatAttune, record: Record) -> None:
    steps = list(example.build_agent(model, force=True).stream(REQUEST, thread("steps"), stream_mode="values"))
    assert_judged(model, replies_of(steps[-1]["messages"]), record)


@with_retries
def test_feedback_on_agent_streamed_by_tokens(model: ChatAttune, record: Record) -> None:
    """LangGraph's `messages` mode streams although the node invokes; ChatOpenAI loses the id there."""
    agent = example.build_agent(model, force=True)
    pieces = [piece for piece, _ in agent.stream(REQUEST, thread("tokens"), stream_mode="messages")]
    chunks = [piece for piece in pieces if isinstance(piece, AIMessageChunk)]
    replies = replies_of(agent.get_state(thread("tokens")).values["messages"])
    assert len(chunks) > len(replies), "the replies are streamed in pieces"
    assert_judged(model, replies, record)
    ids = {chunk.response_metadata["id"] for chunk in chunks if "id" in chunk.response_metadata}
    assert ids == {reply.response_metadata["id"] for reply in replies}, "the last chunk of each reply has the id"


@pytest.mark.asyncio(loop_scope="session")  # LangChain keeps one connection pool for all its models
@with_retries
async def test_feedback_on_awaited_agent(model: ChatAttune, record: Record) -> None:
    agent = example.build_agent(model, force=True)
    async for _ in agent.astream(REQUEST, thread("awaited"), stream_mode="messages"):
        pass
    assert_judged(model, replies_of((await agent.aget_state(thread("awaited"))).values["messages"]), record)


@with_retries
def test_feedback_by_metadata_with_chat_openai(attune: Running, record: Record) -> None:
    """ChatOpenAI keeps no id; the newest turn with this metadata is the target."""
    turn = uuid4().hex
    options: Any = {"base_url": attune.base_url, "api_key": attune.key, "extra_body": {"metadata": {"turn": turn}}}
    agent = example.build_agent(
        ChatOpenAI(model="shop", max_completion_tokens=120, temperature=0.3, **options), force=True
    )
    for _ in agent.stream(REQUEST, thread("stock"), stream_mode="messages"):
        pass
    replies = replies_of(agent.get_state(thread("stock")).values["messages"])
    assert len(replies) >= 2 and all("id" not in reply.response_metadata for reply in replies)
    with openai.OpenAI(base_url=attune.base_url, api_key=attune.key) as client:
        body = {"target": {"metadata": {"turn": turn}}, "kind": "binary", "value": True}
        result: Any = client.post("/feedback", body=body, cast_to=object)
    last = record.turn(result["completion_id"])
    assert last.reply == {"role": "assistant", "content": replies[-1].text}


@with_retries
def test_model_chooses_the_tool(model: ChatAttune, record: Record) -> None:
    agent = example.build_agent(model)
    turns = [replies_of(agent.invoke(REQUEST, thread(f"free-{number}"))["messages"]) for number in range(3)]
    assert any(replies[0].tool_calls for replies in turns)
    for replies in turns:
        for reply in replies:
            record.turn(reply.response_metadata["id"])


@with_retries
def test_example_runs(
    attune: Running, record: Record, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ATTUNE_URL", attune.url)
    monkeypatch.setenv("ATTUNE_API_KEY", attune.key)
    monkeypatch.setattr("sys.argv", ["agent", "--model", "shop", "--force", "Where is my order 4321?"])
    example.main()
    output = capsys.readouterr().out
    assert re.search(r"shop@v0, [2-9] rated (good|bad)", output), output


def test_example_orders_and_judge_agree() -> None:
    assert {example.order_state(str(number)) for number in range(1000, 1010)} == set(ORDERS)
    question = "Where is my order 4321?"
    assert example.is_helpful(question, f"It takes {ORDERS[example.order_state('4321')]}.")
    assert not example.is_helpful(question, "No idea.")
