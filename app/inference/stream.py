"""ChatStream: one streamed reply, passed on chunk by chunk and captured as a whole."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from types import TracebackType
from typing import Any, Self

import aiohttp
import anyio
import orjson

from app.inference.capture import Capture
from app.inference.errors import EngineRefused, EngineUnavailable
from app.inference.request import ChatCall
from app.inference.stream_state import StreamState
from app.inference.transport import EngineTransport, to_engine_error

ABORT_TIMEOUT_SECONDS = 5.0
ABORT_INTERVAL_SECONDS = 0.5


async def abort_until_done(abort: Callable[[str], Awaitable[None]], rid: str, reply: asyncio.Task[Any]) -> None:
    """Repeat the abort until the reply has ended. Raises what `abort` raises.

    An abort may arrive before the request that it belongs to, and SGLang ignores an abort of an unknown request.
    """
    while not reply.done():
        await abort(rid)
        await asyncio.wait([reply], timeout=ABORT_INTERVAL_SECONDS)


class ChatStream:
    """An async context manager and iterator of chunks; `capture` holds the tokens after it has been left.

    Entering waits for the first token and raises the engine's refusal. Leaving early (by a break or a cancellation)
    aborts the engine's work and waits for the ids of the tokens generated until then. A separate task reads the
    connection, because a cancelled read would close it and lose those ids.
    """

    def __init__(
        self,
        transport: EngineTransport,
        call: ChatCall,
        abort: Callable[[str], Awaitable[None]],
        *,
        key: str | None,
        read_timeout: float,
    ) -> None:
        self.call = call
        self._transport = transport
        self._key, self._read_timeout = key, read_timeout
        self._abort = abort
        self._state = StreamState(call)
        self._chunks: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        self._opened = asyncio.Event()
        self._reader: asyncio.Task[None] | None = None
        self._capture: Capture | None = None
        self._left_early = False
        self._response_started = False

    @property
    def capture(self) -> Capture:
        assert self._capture is not None, "the capture exists only after the stream has been left"
        return self._capture

    @property
    def capture_or_none(self) -> Capture | None:
        """The capture; None while the stream runs or if it was never entered."""
        return self._capture

    async def __aenter__(self) -> Self:
        self._reader = asyncio.create_task(self._read())
        entered = False
        try:
            await self._opened.wait()
            if not self._response_started:
                await self._reader  # raises the engine's refusal
            entered = True
        finally:
            if not entered:
                await self._close()
        return self

    async def __aiter__(self) -> AsyncIterator[dict[str, Any]]:
        assert self._reader is not None, "enter the stream before iterating it"
        while (chunk := await self._chunks.get()) is not None:
            yield chunk
        await self._reader  # raises the error that broke off the reply

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._close()

    async def _read(self) -> None:
        try:
            body = self.call.body(stream=True)
            with self._transport.translate_errors():
                async with self._transport.open(
                    "POST", "/v1/chat/completions", body, key=self._key, read_timeout=self._read_timeout
                ) as response:
                    await self._relay(response)
        finally:
            self._opened.set()
            self._chunks.put_nowait(None)

    async def _relay(self, response: aiohttp.ClientResponse) -> None:
        if response.status >= 400:
            raise to_engine_error(response.status, await response.read())
        self._response_started = True
        self._opened.set()
        async for data in _read_events(response):
            if data == b"[DONE]":
                return
            chunk = orjson.loads(data)
            if "error" in chunk:
                raise to_engine_error(int(chunk["error"].get("code") or 500), data)
            if (client_chunk := self._state.add_chunk(chunk)) is not None:
                self._chunks.put_nowait(client_chunk)
        raise EngineUnavailable(f"The engine at {self._transport.url} closed the stream before the reply was complete.")

    async def _close(self) -> None:
        """Abort a running reply and build the capture. Shielded from cancellation, which is one way to leave."""
        assert self._reader is not None
        with anyio.CancelScope(shield=True):
            if not self._reader.done():
                await self._abort_reply()
            self._capture = self._state.capture(interruption=self._interruption())

    async def _abort_reply(self) -> None:
        assert self._reader is not None
        self._left_early = True
        with anyio.move_on_after(ABORT_TIMEOUT_SECONDS):
            with suppress(EngineUnavailable, EngineRefused):
                await abort_until_done(self._abort, self.call.rid, self._reader)
        self._reader.cancel()
        await asyncio.wait([self._reader])

    def _interruption(self) -> str | None:
        assert self._reader is not None
        if self._reader.cancelled():
            return "the client left and the engine did not report what it had generated"
        if (error := self._reader.exception()) is not None:
            return str(error)
        if self._left_early and self._state.finish_reason is None:
            return "the client left before the reply was complete"
        return None


async def _read_events(response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """Yield the data of each server-sent event. SGLang writes one `data:` line for each."""
    buffer = b""
    async for part in response.content.iter_any():
        *events, buffer = (buffer + part).split(b"\n\n")
        for event in events:
            if event.startswith(b"data: "):
                yield event[6:]
