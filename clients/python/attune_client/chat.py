"""A thin chat client. OpenAI's client has more: see `wrap`."""

import json
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import httpx

from attune_client.errors import connection_error, error_of
from attune_client.replies import read_header
from attune_client.transport import AsyncTransport, Request, SyncTransport

PATH = "/v1/chat/completions"
Messages = str | Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class ChatReply:
    """A reply. `raw` is the response of the API, with all choices; `text` is that of the first one."""

    completion_id: str
    version: str
    conversation_id: str | None
    raw: dict[str, Any] = field(repr=False)

    @property
    def text(self) -> str:
        return self.raw["choices"][0]["message"].get("content") or ""


class _StreamState:
    """What the two streams share: the ids, which are known before the first piece, and the text so far."""

    def __init__(self, response: httpx.Response) -> None:
        self._response = response
        self.completion_id = read_header(response.headers, "x-completion-id") or ""
        self.version = read_header(response.headers, "x-policy-version") or ""
        self.conversation_id = read_header(response.headers, "x-conversation-id")
        self.finish_reason: str | None = None
        self.text = ""
        self._rest = b""  # the begin of a line whose end has not arrived

    def _split(self, chunk: bytes) -> list[bytes]:
        """Return the lines that end in this chunk. httpx would also split at the line breaks of Unicode in a text."""
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        return lines

    def _read_line(self, line: bytes) -> str:
        """Return the text that a line of the stream adds to the first choice. Raises APIError for an error event."""
        if not line.startswith(b"data:") or (data := line[5:].strip()) == b"[DONE]":
            return ""
        event = json.loads(data)
        if "error" in event:
            raise error_of(event, 500, self._response.headers)
        added = ""
        for choice in event.get("choices") or ():
            if choice["index"] == 0:
                added += choice["delta"].get("content") or ""
                self.finish_reason = choice.get("finish_reason") or self.finish_reason
        self.text += added
        return added


class ChatStream(_StreamState):
    """Iterate over the pieces of a reply's text. Feedback can be given on the stream itself."""

    def __iter__(self) -> Iterator[str]:
        try:
            for chunk in self._response.iter_bytes():
                for line in self._split(chunk):
                    if piece := self._read_line(line):
                        yield piece
            if piece := self._read_line(self._rest):
                yield piece
        except httpx.TransportError as error:
            raise connection_error(error) from error
        finally:
            self._response.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._response.close()


class AsyncChatStream(_StreamState):
    """Iterate over the pieces of a reply's text; the asynchronous form of ChatStream."""

    async def __aiter__(self) -> AsyncIterator[str]:
        try:
            async for chunk in self._response.aiter_bytes():
                for line in self._split(chunk):
                    if piece := self._read_line(line):
                        yield piece
            if piece := self._read_line(self._rest):
                yield piece
        except httpx.TransportError as error:
            raise connection_error(error) from error
        finally:
            await self._response.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._response.aclose()


class Chat:
    """Chat with a policy or a version. `options` are fields of OpenAI's API, such as temperature or metadata."""

    def __init__(self, transport: SyncTransport) -> None:
        self._transport = transport

    def create(self, messages: Messages, *, model: str = "assistant", **options: Any) -> ChatReply:
        """Return a reply. `messages` may be the text of one user message."""
        return _reply(self._transport.send(_request(messages, model, options)))

    def stream(self, messages: Messages, *, model: str = "assistant", **options: Any) -> ChatStream:
        """Return a reply as a stream of text."""
        return ChatStream(self._transport.send(_request(messages, model, options, is_stream=True)))


class AsyncChat:
    """Chat with a policy or a version; the asynchronous form of Chat."""

    def __init__(self, transport: AsyncTransport) -> None:
        self._transport = transport

    async def create(self, messages: Messages, *, model: str = "assistant", **options: Any) -> ChatReply:
        """Return a reply. `messages` may be the text of one user message."""
        return _reply(await self._transport.send(_request(messages, model, options)))

    async def stream(self, messages: Messages, *, model: str = "assistant", **options: Any) -> AsyncChatStream:
        """Return a reply as a stream of text."""
        return AsyncChatStream(await self._transport.send(_request(messages, model, options, is_stream=True)))


def _request(messages: Messages, model: str, options: Mapping[str, Any], *, is_stream: bool = False) -> Request:
    listed = [{"role": "user", "content": messages}] if isinstance(messages, str) else list(messages)
    body = {"model": model, "messages": listed, **options, "stream": is_stream}
    return Request("POST", PATH, body, is_stream=is_stream)


def _reply(response: httpx.Response) -> ChatReply:
    raw = response.json()
    version = read_header(response.headers, "x-policy-version") or raw["model"]
    return ChatReply(raw["id"], version, read_header(response.headers, "x-conversation-id"), raw)
