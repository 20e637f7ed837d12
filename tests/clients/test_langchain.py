"""LangChain: ChatOpenAI works; ChatAttune also keeps the completion id, so every reply can get feedback."""

import subprocess
import sys
from collections.abc import Sequence
from typing import Any, Literal
from uuid import uuid4

import openai
import pytest
from attune_client.langchain import ChatAttune
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field

from app.core.settings import DEMO_MODEL, REPOSITORY
from demo.dialogues import SYSTEM
from tests.clients.conftest import CONSTRAINED, Record, Running
from tests.clients.retries import with_retries
from tests.support.engine_adapters import bias_without_end

MESSAGES = [("system", SYSTEM), ("user", "When are you open on Friday?")]
ORDER: list[Any] = [("system", SYSTEM), ("user", "Where is my order 4321?")]


class Opening(BaseModel):
    """When the shop is open."""

    day: Literal["Friday", "Saturday"]
    open: bool


class Order(BaseModel):
    """Look up the state of an order."""

    order_id: str = Field(description="The number of the order.")


Order.__name__ = "order_status"  # the demo model knows this name; with another it calls no tool in two replies of five


@tool
def order_status(order_id: str) -> str:
    """Look up the state of an order."""
    return '{"state": "shipped"}'


@pytest.fixture
def plain(attune: Running) -> ChatOpenAI:
    options: Any = {"base_url": attune.base_url, "api_key": attune.key, "max_retries": 0}
    return ChatOpenAI(model="shop", max_completion_tokens=160, temperature=0.3, **options)


@pytest.fixture
def model(attune: Running) -> ChatAttune:
    options: Any = {"base_url": attune.base_url, "api_key": attune.key, "max_retries": 0}
    return ChatAttune(model="shop", max_completion_tokens=64, temperature=0.3, **options)


def join(chunks: Sequence[BaseMessage]) -> Any:
    message: Any = chunks[0]
    for chunk in chunks[1:]:
        message = message + chunk
    return message


def test_chat_openai_is_invoked_and_streamed(plain: ChatOpenAI, record: Record) -> None:
    reply = plain.invoke(MESSAGES)
    assert reply.response_metadata["model_name"] == "shop@v0"
    turn = record.turn(reply.response_metadata["id"])
    assert turn.reply == {"role": "assistant", "content": reply.text}
    never_ends = plain.bind(max_tokens=32, logit_bias=bias_without_end(DEMO_MODEL))  # else it may have two tokens
    chunks = list(never_ends.stream(MESSAGES))
    assert len(chunks) > 4 and join(chunks).response_metadata["finish_reason"] in ("stop", "length")


@with_retries
def test_chat_openai_calls_tools(plain: ChatOpenAI, record: Record) -> None:
    reply = plain.bind_tools([order_status], tool_choice="any").invoke(ORDER)
    [call] = reply.tool_calls
    assert call["name"] == "order_status" and call["args"].keys() == {"order_id"}
    record.turn(reply.response_metadata["id"], exclusion_reason=CONSTRAINED)
    result = order_status.invoke(call)
    assert isinstance(result, ToolMessage)
    answer = plain.bind_tools([order_status]).invoke([*ORDER, reply, result])
    assert answer.text or answer.tool_calls
    record.turn(answer.response_metadata["id"])


@pytest.mark.parametrize(
    ("method", "schema", "messages"),
    [("json_schema", Opening, MESSAGES), ("function_calling", Order, ORDER)],
    ids=["json_schema", "function_calling"],
)
@with_retries
def test_chat_openai_returns_structured_output(
    plain: ChatOpenAI, record: Record, method: Any, schema: type[BaseModel], messages: Any
) -> None:
    bound = plain.with_structured_output(schema, method=method, include_raw=True)
    answer: Any = bound.invoke(messages)
    assert isinstance(answer["parsed"], schema), answer
    record.turn(answer["raw"].response_metadata["id"], exclusion_reason=CONSTRAINED)


def test_feedback_by_metadata_on_streamed_reply_of_chat_openai(
    attune: Running, plain: ChatOpenAI, record: Record
) -> None:
    """ChatOpenAI loses the id of a streamed reply; the request's metadata still identifies it."""
    turn = uuid4().hex
    marks = {"thread_id": "ada", "turn": turn}
    reply = join(list(plain.bind(extra_body={"metadata": marks}).stream(MESSAGES)))
    assert "id" not in reply.response_metadata
    with openai.OpenAI(base_url=attune.base_url, api_key=attune.key) as client:
        body = {"target": {"metadata": {"turn": turn}}, "kind": "binary", "value": True}
        client.post("/feedback", body=body, cast_to=object)
        [stored] = client.chat.completions.list(metadata={"turn": turn})
    assert record.turn(stored.id).reply == {"role": "assistant", "content": reply.text}
    assert [row.value for row in record.feedback(stored.id)] == [1.0]


def assert_feedback(
    model: ChatAttune, message: BaseMessage, record: Record, *, exclusion_reason: str | None = None
) -> None:
    """Assert that feedback on the message reaches its turn."""
    recorded = model.feedback(message, "up", comment="thanks", source={"kind": "HUMAN", "id": "ada"})
    completion_id = message.response_metadata["id"]
    assert message.response_metadata["model_name"] == "shop@v0"
    turn = record.turn(completion_id, exclusion_reason=exclusion_reason)
    assert turn.reply is not None and (turn.reply["content"] or "") == message.text
    [row] = record.feedback(completion_id)
    assert (row.id, row.value, row.comment, row.source_id) == (recorded["id"], 1.0, "thanks", "ada")


def test_feedback_on_invoked_reply(model: ChatAttune, record: Record) -> None:
    assert_feedback(model, model.invoke(MESSAGES), record)


def test_feedback_on_streamed_reply(model: ChatAttune, record: Record) -> None:
    reply = join(list(model.stream(MESSAGES)))
    assert_feedback(model, reply, record)
    assert reply.usage_metadata["output_tokens"] == record.turn(reply.response_metadata["id"]).num_output_tokens


@pytest.mark.asyncio(loop_scope="session")  # LangChain keeps one connection pool for all its models
async def test_feedback_on_awaited_replies(model: ChatAttune, record: Record) -> None:
    streamed = join([chunk async for chunk in model.astream(MESSAGES)])
    invoked = await model.ainvoke(MESSAGES)
    for reply in (streamed, invoked):
        await model.afeedback(reply, False)
        assert [row.value for row in record.feedback(reply.response_metadata["id"])] == [-1.0]


@with_retries
def test_feedback_on_streamed_tool_call(model: ChatAttune, record: Record) -> None:
    forced = model.bind_tools([order_status], tool_choice="order_status")
    reply = join(list(forced.stream(ORDER)))
    assert isinstance(reply, AIMessageChunk) and reply.tool_calls[0]["name"] == "order_status"
    assert_feedback(model, reply, record, exclusion_reason=CONSTRAINED)


@with_retries
def test_feedback_on_structured_reply(model: ChatAttune, record: Record) -> None:
    bound = model.with_structured_output(Opening, include_raw=True)
    answer: Any = bound.invoke(MESSAGES)
    assert isinstance(answer["parsed"], Opening)
    assert_feedback(model, answer["raw"], record, exclusion_reason=CONSTRAINED)
    raw = [part["raw"] for part in bound.stream(MESSAGES) if "raw" in part]
    assert_feedback(model, join(raw), record, exclusion_reason=CONSTRAINED)


def test_repeated_feedback_is_recorded_once(model: ChatAttune, record: Record) -> None:
    reply, key = model.invoke(MESSAGES, max_completion_tokens=8), uuid4().hex
    first = model.feedback(reply, True, idempotency_key=key)
    repeated = model.feedback(reply.response_metadata["id"], True, idempotency_key=key)
    assert first["id"] == repeated["id"] and len(record.feedback(reply.response_metadata["id"])) == 1
    with pytest.raises(openai.UnprocessableEntityError):
        model.feedback(reply, False, idempotency_key=key)


def test_changed_feedback_is_new_feedback(model: ChatAttune, record: Record) -> None:
    reply = model.invoke(MESSAGES, max_completion_tokens=8)
    for value in (True, False, True):
        model.feedback(reply, value)
    assert [row.value for row in record.feedback(reply.response_metadata["id"])] == [1.0, -1.0, 1.0]


def test_feedback_on_foreign_message_is_refused(model: ChatAttune) -> None:
    with pytest.raises(ValueError, match="no completion id"):
        model.feedback(AIMessage("hello"), True)


def test_url_and_key_come_from_environment(attune: Running, monkeypatch: pytest.MonkeyPatch, record: Record) -> None:
    with pytest.raises(ValueError, match="ATTUNE_API_KEY"):
        ChatAttune()
    monkeypatch.setenv("ATTUNE_URL", attune.url)
    monkeypatch.setenv("ATTUNE_API_KEY", attune.key)
    reply = ChatAttune(model="shop", max_completion_tokens=8).invoke(MESSAGES)
    record.turn(reply.response_metadata["id"])


def test_client_does_not_import_server() -> None:
    server = {"sqlalchemy", "fastapi", "celery", "app.core.settings"}
    program = f"import sys, attune_client.langchain; print(sorted({server} & set(sys.modules)))"
    loaded = subprocess.run([sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True)
    assert loaded.stdout.strip() == "[]", loaded.stdout + loaded.stderr


def test_missing_langchain_names_the_package() -> None:
    program = "import sys; sys.modules['langchain_openai'] = None; import attune_client.langchain"
    loaded = subprocess.run([sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True)
    assert "ImportError: attune_client.langchain needs LangChain: pip install langchain-openai" in loaded.stderr
