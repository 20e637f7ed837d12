"""ChatStream: one streamed reply, relayed as it comes and captured whole."""

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
from app.inference.transport import EngineTransport, refusal

FAREWELL_SECONDS = 5.0
AGAIN_SECONDS = 0.5


async def insist(abort: Callable[[str], Awaitable[None]], rid: str, reply: asyncio.Task[Any]) -> None:
    """Until the reply has ended. Raises what `abort` raises.

    An abort may overtake the question it is about, and SGLang forgets an abort of what it has not heard yet.
    """
    while not reply.done():
        await abort(rid)
        await asyncio.wait([reply], timeout=AGAIN_SECONDS)


class ChatStream:
    """Enter it, iterate it, leave it: then `capture` holds what was said, however it ended.

    Entering waits for the first token and raises what the engine refuses. Leaving early (a break, a
    cancellation) aborts the engine's work and waits for the ids of what was generated until then. A task of
    its own reads the wire, because a cancelled read would tear the connection and lose those ids.
    """

    def __init__(
        self,
        wire: EngineTransport,
        call: ChatCall,
        abort: Callable[[str], Awaitable[None]],
        *,
        key: str | None,
        patience: float,
    ) -> None:
        self.call = call
        self._wire = wire
        self._key, self._patience = key, patience
        self._abort = abort
        self._transcript = StreamState(call)
        self._chunks: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        self._opened = asyncio.Event()
        self._reader: asyncio.Task[None] | None = None
        self._capture: Capture | None = None
        self._left_early = False
        self._begun = False

    @property
    def capture(self) -> Capture:
        assert self._capture is not None, "a capture is there when the stream has been left"
        return self._capture

    @property
    def captured(self) -> Capture | None:
        """None while the stream runs, or when it was never entered."""
        return self._capture

    async def __aenter__(self) -> Self:
        self._reader = asyncio.create_task(self._read())
        entered = False
        try:
            await self._opened.wait()
            if not self._begun:
                await self._reader  # raises what the engine refused
            entered = True
        finally:
            if not entered:
                await self._leave()
        return self

    async def __aiter__(self) -> AsyncIterator[dict[str, Any]]:
        assert self._reader is not None, "a stream must be entered first"
        while (chunk := await self._chunks.get()) is not None:
            yield chunk
        await self._reader  # raises what broke the reply off

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._leave()

    async def _read(self) -> None:
        try:
            body = self.call.body(stream=True)
            with self._wire.in_sentences():
                async with self._wire.open(
                    "POST", "/v1/chat/completions", body, key=self._key, patience=self._patience
                ) as response:
                    await self._relay(response)
        finally:
            self._opened.set()
            self._chunks.put_nowait(None)

    async def _relay(self, response: aiohttp.ClientResponse) -> None:
        if response.status >= 400:
            raise refusal(response.status, await response.read())
        self._begun = True
        self._opened.set()
        async for data in _events(response):
            if data == b"[DONE]":
                return
            chunk = orjson.loads(data)
            if "error" in chunk:
                raise refusal(int(chunk["error"].get("code") or 500), data)
            if (relayed := self._transcript.absorb(chunk)) is not None:
                self._chunks.put_nowait(relayed)
        raise EngineUnavailable(f"The engine at {self._wire.url} ended the reply before its end.")

    async def _leave(self) -> None:
        """Shielded: whoever leaves because he was cancelled must still come home with a capture."""
        assert self._reader is not None
        with anyio.CancelScope(shield=True):
            if not self._reader.done():
                await self._cut()
            self._capture = self._transcript.capture(broken=self._broken())

    async def _cut(self) -> None:
        assert self._reader is not None
        self._left_early = True
        with anyio.move_on_after(FAREWELL_SECONDS):
            with suppress(EngineUnavailable, EngineRefused):
                await insist(self._abort, self.call.rid, self._reader)
        self._reader.cancel()
        await asyncio.wait([self._reader])

    def _broken(self) -> str | None:
        assert self._reader is not None
        if self._reader.cancelled():
            return "the engine did not say what it had generated when the client left"
        if (error := self._reader.exception()) is not None:
            return str(error)
        if self._left_early and self._transcript.finish_reason is None:
            return "the client left before the end"
        return None


async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """The data of each server-sent event; SGLang writes one line each."""
    rest = b""
    async for piece in response.content.iter_any():
        *events, rest = (rest + piece).split(b"\n\n")
        for event in events:
            if event.startswith(b"data: "):
                yield event[6:]
