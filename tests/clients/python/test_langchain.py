"""ChatAttune: several choices, and a model that is serialized. tests/clients/test_langchain.py has the rest."""

from typing import Any

import pytest
from attune_client import Attune
from attune_client.langchain import ChatAttune
from langchain_core.load import dumps, loads
from langchain_core.messages import HumanMessage
from langchain_openai import ChatOpenAI

from app.models import Feedback
from tests.support.deployment import Harness


@pytest.fixture
def model(url: str, harness: Harness) -> ChatAttune:
    options: Any = {"base_url": f"{url}/v1", "api_key": harness.key, "max_retries": 0, "temperature": 0.3}
    return ChatAttune(model="shop", **options)


async def test_each_choice_takes_feedback(model: ChatAttune, client: Attune, harness: Harness) -> None:
    result = model.generate([[HumanMessage("When are you open?")]], n=3)
    messages = [generation.message for generation in result.generations[0]]  # type: ignore[union-attr]
    assert [message.response_metadata["choice_index"] for message in messages] == [0, 1, 2]
    assert {message.response_metadata["model_name"] for message in messages} == {"shop@v0"}
    records = [model.feedback(message, index == 1) for index, message in enumerate(messages)]
    assert [(record["choice_index"], record["value"]) for record in records] == [(0, -1.0), (1, 1.0), (2, -1.0)]
    ranking = client.feedback.rank([messages[1], [messages[0], messages[2]]])
    id = records[0]["completion_id"]
    references = [{"completion_id": id, "choice_index": 1}, [id, {"completion_id": id, "choice_index": 2}]]
    assert ranking["raw_value"] == references
    assert len({row.turn_id for row in await harness.all(Feedback) if row.turn_id}) == 3


def test_single_reply_is_choice_0(model: ChatAttune) -> None:
    reply = model.invoke("When are you open?")
    assert "choice_index" not in reply.response_metadata
    assert model.feedback(reply, True)["choice_index"] == 0


def test_streamed_reply_of_chat_openai_with_headers(client: Attune, url: str, harness: Harness) -> None:
    options: Any = {"base_url": f"{url}/v1", "api_key": harness.key, "include_response_headers": True}
    first, *rest = ChatOpenAI(model="shop", **options).stream("When are you open?")
    reply: Any = sum(rest, first)
    assert client.feedback.up(reply)["completion_id"] == reply.response_metadata["headers"]["x-completion-id"]


def test_model_is_serialized_without_its_key(
    model: ChatAttune, harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = dumps(model)
    assert harness.key not in text
    options: Any = {"allowed_objects": [ChatAttune], "valid_namespaces": ["attune_client"]}
    loaded = loads(text, secrets_map={"ATTUNE_API_KEY": harness.key}, **options)
    assert isinstance(loaded, ChatAttune) and loaded.temperature == 0.3
    assert loaded.feedback(loaded.invoke("When are you open?"), True)["value"] == 1.0
    monkeypatch.setenv("ATTUNE_API_KEY", harness.key)
    assert loads(text, secrets_from_env=True, **options).invoke("Hello").text
