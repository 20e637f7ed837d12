"""Relay: the choices of one completion, asked of the engine at once and brought together."""

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import anyio

from app.core.errors import AttuneError
from app.inference.capture import Capture
from app.inference.client import Completion, EngineClient
from app.inference.errors import EngineRefused, EngineUnavailable
from app.inference.request import ChatCall
from app.inference.stream import insist

log = logging.getLogger("attune.chat")
ENGINE_TROUBLE = (EngineUnavailable, EngineRefused)


@dataclass(frozen=True)
class Outcome:
    """Of one choice. Without a completion there is an error."""

    completion: Completion | None
    error: AttuneError | None = None


class UnaryFanout:
    """Replies that come at once. `start` asks; `outcomes` waits; `end` ends the engine's work, and what was said until
    then still comes in."""

    def __init__(self, client: EngineClient, calls: Sequence[ChatCall]) -> None:
        self._client, self._calls = client, calls
        self._works: list[asyncio.Task[Outcome]] = []
        self._ending: asyncio.Future[Any] | None = None

    def start(self) -> None:
        self._works = [asyncio.create_task(self._one(call)) for call in self._calls]

    async def outcomes(self) -> list[Outcome]:
        return list(await asyncio.gather(*self._works))

    def end(self) -> None:
        if self._ending is None:
            self._ending = asyncio.gather(*map(self._end, self._calls, self._works))

    async def drop(self) -> None:
        """Nobody waits any more: not even for what was said."""
        with anyio.CancelScope(shield=True):
            for call in self._calls:
                with suppress(*ENGINE_TROUBLE):
                    await self._client.abort(call.rid)
            for work in self._works:
                work.cancel()
            await asyncio.wait(self._works)

    async def _end(self, call: ChatCall, work: asyncio.Task[Outcome]) -> None:
        with suppress(*ENGINE_TROUBLE):  # it is too busy to listen: its reply is waited for
            await insist(self._client.abort, call.rid, work)

    async def _one(self, call: ChatCall) -> Outcome:
        try:
            return Outcome(await self._client.complete(call))
        except Exception as error:
            if len(self._calls) > 1:  # without this one there is no completion: spare the engine the others
                self.end()
            return Outcome(None, trouble(error))


class StreamFanout:
    """Streams side by side, as one stream of OpenAI's chunks.

    Example:
        choices.start(); await choices.begun()
        async for chunk in choices: ...     # raises what broke one of them off
        await choices.leave()               # always; then `captures()` tells what came of each
    """

    def __init__(self, client: EngineClient, calls: Sequence[ChatCall]) -> None:
        self._streams = [client.stream(call) for call in calls]
        self._queue: asyncio.Queue[tuple[int, dict[str, Any] | AttuneError | None]] = asyncio.Queue()
        self._entered: list[asyncio.Future[None]] = []
        self._pumps: list[asyncio.Task[None]] = []
        self._refused: list[AttuneError] = []

    def start(self) -> None:
        loop = asyncio.get_running_loop()
        self._entered = [loop.create_future() for _ in self._streams]
        self._pumps = [asyncio.create_task(self._pump(index)) for index in range(len(self._streams))]

    async def begun(self) -> None:
        """Every choice has its first token. Raises what the engine refuses."""
        await asyncio.wait(self._entered)
        for refused in self._refused:
            raise refused

    async def __aiter__(self) -> AsyncIterator[dict[str, Any]]:
        """Choices begin in their order, as stock clients expect; from then on they come as they come."""
        running, usages, frame = len(self._streams), [], {}
        begun, held = 0, [list[dict[str, Any]]() for _ in self._streams]
        while running:
            index, item = await self._queue.get()
            if item is None:
                running -= 1
            elif isinstance(item, AttuneError):
                raise item
            elif item["choices"]:
                item["choices"][0]["index"] = index
                held[index].append(item)
                while begun < len(held) and held[begun]:
                    begun += 1
                for waiting in held[:begun]:
                    while waiting:
                        yield waiting.pop(0)
            else:
                frame = item
                usages.append(item["usage"])
        if usages:
            yield frame | {"usage": total(usages)}

    async def leave(self) -> None:
        with anyio.CancelScope(shield=True):  # a client that hung up cancels us here; the captures still come home
            for pump in self._pumps:
                pump.cancel()
            if self._pumps:
                await asyncio.wait(self._pumps)

    def captures(self) -> list[Capture | None]:
        return [stream.captured for stream in self._streams]

    async def _pump(self, index: int) -> None:
        try:
            async with self._streams[index] as stream:
                self._entered[index].set_result(None)
                async for chunk in stream:
                    self._queue.put_nowait((index, chunk))
            self._queue.put_nowait((index, None))
        except Exception as odd:
            error = trouble(odd)
            if not self._entered[index].done():
                self._refused.append(error)
            self._queue.put_nowait((index, error))
        finally:
            if not self._entered[index].done():
                self._entered[index].set_result(None)


def trouble(error: Exception) -> AttuneError:
    """Whatever goes wrong with one choice ends that completion, and nobody waits for it for ever."""
    if isinstance(error, AttuneError):
        return error
    log.error("an engine's answer was not understood", exc_info=error)
    return EngineUnavailable("The engine's answer was not understood.")


def total(usages: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Of n choices: the prompt counts once."""
    prompt, said = usages[0]["prompt_tokens"], sum(usage["completion_tokens"] for usage in usages)
    return {"prompt_tokens": prompt, "completion_tokens": said, "total_tokens": prompt + said}
