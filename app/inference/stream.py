"""ChatStream: one streamed reply, passed on chunk by chunk and captured as a whole."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any, Protocol, Self, TypeVar, cast

import aiohttp
import anyio
import orjson

from alignment.chat_messages import ToolCall
from app.inference.capture import Capture, WeightSpan, build_capture, to_logprob
from app.inference.chat_format import ChatChunk, ChunkChoice, ToolCallPart
from app.inference.request import ChatCall
from app.inference.transport import EngineRefused, EngineTransport, EngineUnavailable

T = TypeVar("T")
EngineChunk = dict[str, Any]  # a ChatChunk with what the engine adds to it
ABORT_TIMEOUT_SECONDS = 5.0
ABORT_INTERVAL_SECONDS = 0.5


async def abort_until_done(abort: Callable[[str], Awaitable[None]], rid: str, reply: asyncio.Task[T]) -> None:
    """Repeat the abort until the reply has ended. Raises what `abort` raises.

    An abort may arrive before the request that it belongs to, and engines ignore an abort of an unknown request.
    """
    while not reply.done():
        await abort(rid)
        await asyncio.wait([reply], timeout=ABORT_INTERVAL_SECONDS)


class StreamState(ABC):
    """Collects the tokens of a streamed reply from the engine's chunks, and returns the chunks for the client.

    Each kind of engine has a subclass, which knows where in its chunks the ids are.
    """

    def __init__(self, call: ChatCall) -> None:
        self.call = call
        self.prompt_ids: list[int] = []
        self.output_ids: list[int] = []
        self.logprobs: list[float] = []
        self.finish_reason: str | None = None
        self.weight_versions: list[WeightSpan] = []  # as in Capture
        self._text: list[str] = []
        self._tool_calls: dict[int, ToolCall] = {}

    @abstractmethod
    def take_engine_fields(self, chunk: EngineChunk) -> None:
        """Record the ids of a chunk, and remove what is not OpenAI's. A choice may keep `matched_stop`, the stop text
        that ended the reply."""

    def add_chunk(self, engine_chunk: EngineChunk) -> ChatChunk | None:
        """Return the chunk as OpenAI sends it, or None if it holds nothing for the client."""
        self.take_engine_fields(engine_chunk)
        chunk = cast(ChatChunk, engine_chunk)
        if not chunk["choices"]:
            return chunk if self.call.include_usage and chunk.get("usage") else None
        choice = chunk["choices"][0]
        self._record(choice)
        delta = choice["delta"]
        if (tool_calls := delta.get("tool_calls")) is not None:
            allowed = [part for part in tool_calls if part["index"] < self.call.max_tool_calls]
            if allowed:
                delta["tool_calls"] = allowed
            else:
                del delta["tool_calls"]
        if not self.call.names_stop_text:
            choice.pop("matched_stop", None)
        if not self.call.logprobs:
            choice["logprobs"] = None
        # The engine sends the log-probs of tokens without text in separate chunks.
        if not delta and choice["finish_reason"] is None and choice["logprobs"] is None:
            return None
        if self.call.include_usage:
            chunk.setdefault("usage", None)
        return chunk

    def _record(self, choice: ChunkChoice) -> None:
        if (logprobs := choice.get("logprobs")) is not None:
            self.logprobs += [to_logprob(token["logprob"]) for token in logprobs["content"]]
        delta = choice["delta"]
        if content := delta.get("content"):
            self._text.append(content)
        for part in delta.get("tool_calls") or ():
            self._record_tool_call(part)
        if choice["finish_reason"] is not None:
            self.finish_reason = choice["finish_reason"]

    def _record_tool_call(self, part: ToolCallPart) -> None:
        """Add a part of a tool call: its name comes first, then its arguments in several parts."""
        call = self._tool_calls.setdefault(
            part["index"], {"id": part["id"] or "", "type": "function", "function": {"name": "", "arguments": ""}}
        )
        function = part["function"]
        call["function"]["name"] += function.get("name") or ""
        call["function"]["arguments"] += function.get("arguments") or ""

    def capture(self, *, interruption: str | None = None) -> Capture:
        received = Capture(
            prompt_ids=self.prompt_ids,
            output_ids=self.output_ids,
            logprobs=self.logprobs,
            text="".join(self._text),
            tool_calls=[self._tool_calls[index] for index in sorted(self._tool_calls)],
            finish_reason=self.finish_reason,
            weight_versions=self.weight_versions,
            exclusion_reason=interruption,
        )
        return build_capture(self.call, received)


class BuildBody(Protocol):
    """Builds the body of a kind of engine's chat request."""

    def __call__(self, call: ChatCall, *, stream: bool) -> Mapping[str, object]: ...


class ChatStream:
    """An async context manager and iterator of chunks. `capture` holds the tokens after it has been left, else None.

    Entering waits for the first token and raises the engine's refusal. Leaving early (by a break or a cancellation)
    aborts the engine's work and waits for the ids of the tokens generated until then. A separate task reads the
    connection, because a cancelled read would close it and lose those ids.
    """

    def __init__(
        self,
        transport: EngineTransport,
        state: StreamState,
        build_body: BuildBody,
        abort: Callable[[str], Awaitable[None]],
    ) -> None:
        self.call = state.call
        self._transport = transport
        self._state = state
        self._build_body = build_body
        self._abort = abort
        self._chunks: asyncio.Queue[ChatChunk | None] = asyncio.Queue()
        self._opened = asyncio.Event()
        self._reader: asyncio.Task[None]
        self._response_started = False
        self.capture: Capture | None = None

    async def __aenter__(self) -> Self:
        self._reader = asyncio.create_task(self._read())
        try:
            await self._opened.wait()
            if not self._response_started:
                await self._reader  # raises the engine's refusal
        except BaseException:
            await self._close()
            raise
        return self

    async def __aiter__(self) -> AsyncIterator[ChatChunk]:
        while (chunk := await self._chunks.get()) is not None:
            yield chunk
        await self._reader  # raises the error that broke off the reply

    async def __aexit__(self, *exception: object) -> None:
        await self._close()

    async def _read(self) -> None:
        try:
            body = self._build_body(self.call, stream=True)
            async with self._transport.open("/v1/chat/completions", body) as response:
                await self._relay(response)
        finally:
            self._opened.set()
            self._chunks.put_nowait(None)

    async def _relay(self, response: aiohttp.ClientResponse) -> None:
        self._response_started = True
        self._opened.set()
        async for data in _read_events(response):
            if data == b"[DONE]":
                return
            chunk = orjson.loads(data)
            if "error" in chunk:
                raise self._transport.to_error(int(chunk["error"].get("code") or 500), data)
            if (client_chunk := self._state.add_chunk(chunk)) is not None:
                self._chunks.put_nowait(client_chunk)
        raise EngineUnavailable(f"The engine at {self._transport.url} closed the stream before the reply was complete.")

    async def _close(self) -> None:
        """Abort a running reply and build the capture. Shielded from cancellation, which is one way to leave."""
        with anyio.CancelScope(shield=True):
            left_early = not self._reader.done()
            if left_early:
                with anyio.move_on_after(ABORT_TIMEOUT_SECONDS), suppress(EngineUnavailable, EngineRefused):
                    await abort_until_done(self._abort, self.call.rid, self._reader)
                self._reader.cancel()
                await asyncio.wait([self._reader])
            self.capture = self._state.capture(interruption=self._interruption(left_early))

    def _interruption(self, left_early: bool) -> str | None:
        if self._reader.cancelled():
            return "the client left and the engine did not report what it had generated"
        if (error := self._reader.exception()) is not None:
            return str(error)
        if left_early and self._state.finish_reason is None:
            return "the client left before the reply was complete"
        return None


async def _read_events(response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """Yield the data of each server-sent event. Engines write one `data:` line for each."""
    buffer = b""
    async for part in response.content.iter_any():
        *events, buffer = (buffer + part).split(b"\n\n")
        for event in events:
            if event.startswith(b"data: "):
                yield event[6:]
