"""Fan-out: run all choices of one completion on the engine at the same time and merge their results."""

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress

import anyio

from app.core.errors import AttuneError
from app.inference.capture import Capture
from app.inference.chat_format import ChatChunk, Usage
from app.inference.engine import Completion, EngineClient
from app.inference.request import ChatCall
from app.inference.stream import abort_until_done
from app.inference.transport import EngineRefused, EngineUnavailable

log = logging.getLogger("attune.chat")
ENGINE_ERRORS = (EngineUnavailable, EngineRefused)


class UnaryFanout:
    """Choices that are not streamed.

    `start` sends the calls and `wait` returns a completion or an error for each. `abort` ends the engine's work; `wait`
    then returns what was generated until then.
    """

    def __init__(self, client: EngineClient, calls: Sequence[ChatCall]) -> None:
        self._client, self._calls = client, calls
        self._tasks: list[asyncio.Task[Completion | AttuneError]] = []
        self._aborts: asyncio.Future[list[None]] | None = None

    def start(self) -> None:
        self._tasks = [asyncio.create_task(self._complete_choice(call)) for call in self._calls]

    async def wait(self) -> list[Completion | AttuneError]:
        return await asyncio.gather(*self._tasks)

    def abort(self) -> None:
        if self._aborts is None:
            self._aborts = asyncio.gather(*map(self._abort_choice, self._calls, self._tasks))

    async def close(self) -> None:
        """Abort all choices without waiting for what they generated."""
        with anyio.CancelScope(shield=True):
            for call in self._calls:
                with suppress(*ENGINE_ERRORS):
                    await self._client.abort(call.rid)
            for task in self._tasks:
                task.cancel()
            await asyncio.wait(self._tasks)

    async def _abort_choice(self, call: ChatCall, task: asyncio.Task[Completion | AttuneError]) -> None:
        with suppress(*ENGINE_ERRORS):  # if the engine cannot take the abort, the reply runs to its end
            await abort_until_done(self._client.abort, call.rid, task)

    async def _complete_choice(self, call: ChatCall) -> Completion | AttuneError:
        try:
            return await self._client.complete(call)
        except Exception as error:
            if len(self._calls) > 1:  # one failed choice fails the completion, so the others are not needed
                self.abort()
            return to_attune_error(error)


class StreamFanout:
    """Choices that stream at the same time, merged into one stream of OpenAI's chunks.

    Example:
        fanout.start(); await fanout.wait_until_started()
        async for chunk in fanout: ...     # raises the error that broke off a choice
        await fanout.close()               # always; `captures()` then holds what each choice generated
    """

    def __init__(self, client: EngineClient, calls: Sequence[ChatCall]) -> None:
        self._streams = [client.stream(call) for call in calls]
        self._queue: asyncio.Queue[tuple[int, ChatChunk | AttuneError | None]] = asyncio.Queue()
        self._started: list[asyncio.Future[None]] = []
        self._readers: list[asyncio.Task[None]] = []
        self._start_errors: list[AttuneError] = []

    def start(self) -> None:
        loop = asyncio.get_running_loop()
        self._started = [loop.create_future() for _ in self._streams]
        self._readers = [asyncio.create_task(self._read_stream(index)) for index in range(len(self._streams))]

    async def wait_until_started(self) -> None:
        """Return when every choice has its first token. Raises the engine's refusal, or the error before it."""
        await asyncio.wait(self._started)
        if self._start_errors:
            raise self._start_errors[0]

    async def __aiter__(self) -> AsyncIterator[ChatChunk]:
        """Yield the chunks as they arrive, but each choice's first chunk in the order of the choices.

        OpenAI's clients expect that order. The usage of all choices comes last, in one chunk.
        """
        running, num_started = len(self._streams), 0
        pending = [list[ChatChunk]() for _ in self._streams]
        usages: list[Usage] = []
        usage_chunk: ChatChunk = {"choices": []}
        while running:
            index, item = await self._queue.get()
            if item is None:
                running -= 1
            elif isinstance(item, AttuneError):
                raise item
            elif item["choices"]:
                item["choices"][0]["index"] = index
                pending[index].append(item)
                while num_started < len(pending) and pending[num_started]:
                    num_started += 1
                for chunks in pending[:num_started]:
                    while chunks:
                        yield chunks.pop(0)
            elif (usage := item.get("usage")) is not None:
                usage_chunk = item
                usages.append(usage)
        if usages:
            yield {**usage_chunk, "usage": sum_usage(usages)}

    async def close(self) -> None:
        """Abort the choices that still run and wait for their captures."""
        with anyio.CancelScope(shield=True):  # a disconnected client cancels this task; the captures are still needed
            for reader in self._readers:
                reader.cancel()
            if self._readers:
                await asyncio.wait(self._readers)

    def captures(self) -> list[Capture | None]:
        """Return what each choice generated; None for one that was never started. Complete after `close`."""
        return [stream.capture for stream in self._streams]

    async def _read_stream(self, index: int) -> None:
        try:
            async with self._streams[index] as stream:
                async for chunk in stream:
                    if not self._started[index].done():
                        self._started[index].set_result(None)
                    self._queue.put_nowait((index, chunk))
            self._queue.put_nowait((index, None))
        except Exception as cause:
            error = to_attune_error(cause)
            if not self._started[index].done():
                self._start_errors.append(error)
            self._queue.put_nowait((index, error))
        finally:
            if not self._started[index].done():
                self._started[index].set_result(None)


def to_attune_error(error: Exception) -> AttuneError:
    """Return the error as it is reported to the client. An unexpected exception is logged."""
    if isinstance(error, AttuneError):
        return error
    log.error("the engine sent a response that could not be processed", exc_info=error)
    return EngineUnavailable("The engine sent a response that could not be processed.")


def sum_usage(usages: Sequence[Usage]) -> Usage:
    """Return the usage of a completion with several choices. The prompt is counted once."""
    prompt, completion = usages[0]["prompt_tokens"], sum(usage["completion_tokens"] for usage in usages)
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
