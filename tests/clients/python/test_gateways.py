"""Behind LiteLLM's proxy: it renames our headers, `assistant@v12` to `assistant`, and removes `id` from feedback."""

import json
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from attune_client import AsyncAttune, Attune, completion_id
from attune_client.feedback import with_id

ID = "chatcmpl-9f2c"
HEADERS = {
    "llm_provider-x-completion-id": ID,
    "llm_provider-x-policy-version": "assistant@v12",
    "llm_provider-x-conversation-id": "conv-1",
}
REPLY = {"id": ID, "model": "assistant", "choices": [{"index": 0, "message": {"content": "Hello"}}]}


def answer(request: httpx.Request) -> httpx.Response:
    if json.loads(request.content)["stream"]:
        return httpx.Response(200, headers=HEADERS, text="data: [DONE]\n\n")
    return httpx.Response(200, headers=HEADERS, json=REPLY)


@pytest.fixture
def proxied() -> Attune:
    http = httpx.Client(transport=httpx.MockTransport(answer))
    return Attune("http://litellm", "sk-1", http_client=http)


def test_headers_are_read_in_both_spellings(proxied: Attune) -> None:
    reply, stream = proxied.chat.create("Hello"), proxied.chat.stream("Hello")
    for found in (reply, stream):
        assert (found.completion_id, found.version, found.conversation_id) == (ID, "assistant@v12", "conv-1")
    assert completion_id(SimpleNamespace(id=None, response=httpx.Response(200, headers=HEADERS))) == ID
    message: Any = SimpleNamespace(response_metadata={"headers": HEADERS})
    assert completion_id(message) == ID


BREAKS = "a\u2028b\u2029c\x85d\x0be"


async def test_stream_is_split_at_the_ends_of_its_lines_alone() -> None:
    """And not at the line breaks of Unicode in a text, nor where a chunk ends."""

    def event(text: str) -> bytes:
        choice = {"index": 0, "delta": {"content": text}, "finish_reason": None}
        return b"data: " + json.dumps({"choices": [choice]}, ensure_ascii=False).encode() + b"\n\n"

    content = event(BREAKS) + event(" and more") + b"data: [DONE]"
    chunks = [content[start : start + 7] for start in range(0, len(content), 7)]

    async def iterate() -> AsyncIterator[bytes]:
        for chunk in chunks:
            yield chunk

    client = httpx.Client(transport=httpx.MockTransport(lambda request: httpx.Response(200, content=iter(chunks))))
    stream = Attune("http://attune", "sk-1", http_client=client).chat.stream("Hello")
    assert "".join(stream) == stream.text == f"{BREAKS} and more"
    transport = httpx.MockTransport(lambda request: httpx.Response(200, content=iterate()))
    async_client = AsyncAttune("http://attune", "sk-1", http_client=httpx.AsyncClient(transport=transport))
    async_stream = await async_client.chat.stream("Hello")
    assert "".join([piece async for piece in async_stream]) == f"{BREAKS} and more"


@pytest.mark.parametrize(("id", "sent"), [("vote-1", "vote-1"), ("a b", None), ("vöte", None), ("v" * 256, None)])
def test_id_of_feedback_is_also_sent_as_a_header(id: str, sent: str | None) -> None:
    requests: list[httpx.Request] = []

    def record(request: httpx.Request) -> httpx.Response:
        requests.append(request)
        return httpx.Response(201, json={"id": "fb-1"})

    client = Attune("http://litellm", "sk-1", http_client=httpx.Client(transport=httpx.MockTransport(record)))
    client.feedback.up(ID, id=id)
    client.feedback.up(ID, key="k")
    client.feedback.up(ID)
    first, keyed, other = requests
    assert first.headers.get("idempotency-key") == sent and json.loads(first.content)["id"] == id
    assert "idempotency-key" not in keyed.headers
    assert other.headers["idempotency-key"] == json.loads(other.content)["id"]
    assert with_id({"id": id})["id"] == id
