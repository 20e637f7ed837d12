"""Feedback from clients that lose the id of a streamed reply: by x-request-id, and by the number of a turn."""

from typing import Any

import openai
from langchain_openai import ChatOpenAI

from tests.clients.conftest import Record, Running

QUESTION = "When are you open on Friday?"


def test_header_of_streamed_chat_openai(attune: Running, record: Record) -> None:
    model = ChatOpenAI(
        model="shop", base_url=attune.base_url, api_key=attune.key, include_response_headers=True, max_tokens=8
    )
    first, *chunks = list(model.stream(QUESTION))
    reply: Any = sum(chunks, first)
    send(attune, request_id=reply.response_metadata["headers"]["x-request-id"])
    assert len(record.feedback(reply.response_metadata["headers"]["x-completion-id"])) == 1


def test_number_of_a_turn(attune: Running, record: Record) -> None:
    chat = {"x-conversation-id": "streamed-without-ids"}
    with openai.OpenAI(base_url=attune.base_url, api_key=attune.key, default_headers=chat, max_retries=0) as client:
        messages: list[Any] = []
        ids = []
        for _ in range(2):
            messages.append({"role": "user", "content": QUESTION})
            stream = client.chat.completions.create(model="shop", messages=messages, max_tokens=8, stream=True)
            chunks = list(stream)
            text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
            messages.append({"role": "assistant", "content": text})
            ids.append(chunks[0].id)
    for turn, completion_id in ((1, ids[0]), (2, ids[1]), (-1, ids[1])):
        send(attune, target={"conversation_id": "streamed-without-ids", "turn": turn}, name=f"turn{turn}")
        assert record.feedback(completion_id)[-1].name == f"turn{turn}"


def send(attune: Running, **fields: Any) -> None:
    with openai.OpenAI(base_url=attune.base_url, api_key=attune.key, max_retries=0) as client:
        client.post("/feedback", body={"kind": "binary", "value": 1, **fields}, cast_to=object)
