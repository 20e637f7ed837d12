"""Answer a chat request: plan it, record its turns, run it on the engine, record how it ended.

Every wire format (chat completions, responses) goes through `complete` and `stream`.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import anyio
from starlette.requests import ClientDisconnect, Request

from alignment.signals.length_penalty import length_penalty
from app.chat import conversations
from app.chat.fanout import ChoiceOutcome, StreamFanout, UnaryFanout, sum_usage
from app.chat.planning import Plan, plan_completion
from app.chat.schemas import ChatRequest
from app.chat.turn_writer import SERVER_STOPPED, TurnEnd, TurnWriter
from app.core.errors import AttuneError
from app.core.services import services_of, settings_of
from app.deployments.resolution import VersionNotLoaded
from app.inference.capture import Capture
from app.models import TurnState
from app.projects.auth import Caller

CLIENT_DISCONNECT = "client_disconnect"
RETRY_MIN_SECONDS, RETRY_MAX_SECONDS = 0.02, 0.25
T = TypeVar("T")


@dataclass(frozen=True)
class CompletionReply:
    """`body` is OpenAI's chat.completion."""

    body: dict[str, Any]
    headers: dict[str, str]


@dataclass(frozen=True)
class StreamingReply:
    """`chunks` are OpenAI's chat.completion.chunk objects.

    The iterator raises AttuneError if the reply breaks off. Closing it early aborts the engine's work and records
    what was generated until then.
    """

    chunks: AsyncGenerator[dict[str, Any], None]
    headers: dict[str, str]


async def complete(request: Request, caller: Caller, chat_request: ChatRequest) -> CompletionReply:
    """Return a whole reply. If the client disconnects, abort the engine's work and record what was generated."""
    return await _retry_during_weight_swap(request, lambda: _complete(request, caller, chat_request))


async def stream(request: Request, caller: Caller, chat_request: ChatRequest) -> StreamingReply:
    """Return a reply as a stream, once every choice has its first token; what the engine refuses is raised."""
    return await _retry_during_weight_swap(request, lambda: _stream(request, caller, chat_request))


async def _retry_during_weight_swap(request: Request, answer: Callable[[], Awaitable[T]]) -> T:
    """Call `answer` again while no engine holds the version; full weights are missing for as long as a swap lasts."""
    settings = settings_of(request)
    wait_seconds = settings.weight_swap_wait_seconds if settings.adaptation == "full" else 0.0
    deadline, pause = time.monotonic() + wait_seconds, RETRY_MIN_SECONDS
    while True:
        try:
            return await answer()
        except VersionNotLoaded:
            if time.monotonic() >= deadline:
                raise
        await asyncio.sleep(pause)
        pause = min(2 * pause, RETRY_MAX_SECONDS)


async def _complete(request: Request, caller: Caller, chat_request: ChatRequest) -> CompletionReply:
    services = services_of(request)
    writer = services.get(TurnWriter)
    plan = await plan_completion(services, caller, chat_request, request.headers)
    fanout = UnaryFanout(plan.client, plan.calls)
    # With full weights the turn is committed before the engine starts: only then are its weights certain.
    if plan.turn_start.required_weights is not None:
        await writer.record_start(plan.turn_start)
    fanout.start()
    try:
        if plan.turn_start.required_weights is None:
            await writer.record_start(plan.turn_start)
    except BaseException:
        await fanout.cancel()
        raise
    disconnected = asyncio.Event()
    watcher = asyncio.create_task(_abort_on_disconnect(request, fanout, disconnected))
    try:
        outcomes = await fanout.wait()
    except asyncio.CancelledError:  # the server is stopping
        await fanout.cancel()
        await _record_ends(writer, [TurnEnd(call.rid, TurnState.ABORTED, None, SERVER_STOPPED) for call in plan.calls])
        raise
    finally:
        watcher.cancel()
    error = next((outcome.error for outcome in outcomes if outcome.error), None)
    captures = [outcome.completion.capture if outcome.completion else None for outcome in outcomes]
    cause = error or (ClientDisconnect() if disconnected.is_set() else None)
    await _record_ends(writer, _turn_ends(plan, captures, cause))
    if error is not None:
        error.headers |= plan.headers
        raise error
    return CompletionReply(_completion_body(plan, outcomes), plan.headers)


async def _stream(request: Request, caller: Caller, chat_request: ChatRequest) -> StreamingReply:
    services = services_of(request)
    writer = services.get(TurnWriter)
    plan = await plan_completion(services, caller, chat_request, request.headers)
    fanout = StreamFanout(plan.client, plan.calls)
    is_recorded = plan.turn_start.required_weights is not None
    if is_recorded:
        await writer.record_start(plan.turn_start)
    fanout.start()
    try:
        if not is_recorded:
            await writer.record_start(plan.turn_start)
        is_recorded = True
        await _wait_for_first_token(request, fanout)
    except BaseException as error:
        await fanout.close()
        if is_recorded:
            await _record_ends(writer, _turn_ends(plan, fanout.captures(), error))
        if isinstance(error, AttuneError):
            error.headers |= plan.headers
        raise
    chunks = _chunks(writer, plan, fanout)
    await anext(chunks)  # enters the generator, so that closing it runs its clean-up
    return StreamingReply(chunks, plan.headers)


async def _chunks(writer: TurnWriter, plan: Plan, fanout: StreamFanout) -> AsyncGenerator[dict[str, Any], None]:
    """Yield one empty item, then the chunks; record the ends of the turns when the generator is left."""
    frame = {"id": plan.id, "model": plan.label, "created": plan.created}
    cause: BaseException | None = None
    try:
        yield {}
        async for chunk in fanout:
            yield chunk | frame
    except BaseException as error:
        cause = error
        raise
    finally:
        await fanout.close()
        await _record_ends(writer, _turn_ends(plan, fanout.captures(), cause))


async def _wait_for_first_token(request: Request, fanout: StreamFanout) -> None:
    """Raise ClientDisconnect if the client leaves first: in a long queue the first token may take minutes."""
    started = asyncio.create_task(fanout.wait_until_started())
    disconnected = asyncio.create_task(_wait_for_disconnect(request))
    try:
        await asyncio.wait((started, disconnected), return_when=asyncio.FIRST_COMPLETED)
        if not started.done():
            raise ClientDisconnect
        await started
    finally:
        disconnected.cancel()
        started.cancel()


async def _wait_for_disconnect(request: Request) -> None:
    """Return when the client disconnects. The body has been read, so no other message matters."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _abort_on_disconnect(request: Request, fanout: UnaryFanout, disconnected: asyncio.Event) -> None:
    await _wait_for_disconnect(request)
    disconnected.set()
    fanout.abort()


async def _record_ends(writer: TurnWriter, ends: Sequence[TurnEnd]) -> None:
    with anyio.CancelScope(shield=True):
        await asyncio.gather(*(writer.record_end(end) for end in ends))


def _turn_ends(plan: Plan, captures: Sequence[Capture | None], cause: BaseException | None) -> list[TurnEnd]:
    """Return how each turn ended. An AttuneError means failure; any other `cause` means that the client left."""
    if isinstance(cause, AttuneError):
        return _unfinished_ends(plan, captures, TurnState.FAILED, "error", str(cause))
    if cause is not None:
        return _unfinished_ends(plan, captures, TurnState.ABORTED, CLIENT_DISCONNECT, None)
    return _finished_ends(plan, captures)


def _unfinished_ends(
    plan: Plan, captures: Sequence[Capture | None], state: TurnState, finish_reason: str, exclusion_reason: str | None
) -> list[TurnEnd]:
    return [
        TurnEnd(call.rid, state, capture, finish_reason, exclusion_reason)
        for call, capture in zip(plan.calls, captures, strict=True)
    ]


def _finished_ends(plan: Plan, captures: Sequence[Capture | None]) -> list[TurnEnd]:
    ends = []
    for call, capture in zip(plan.calls, captures, strict=True):
        assert capture is not None, f"turn {call.rid} ended without a capture"
        prefix_hash = conversations.prefix_hashes([*call.messages, capture.message])[-1]
        penalty = _length_penalty(plan, capture)
        ends.append(TurnEnd(call.rid, TurnState.DONE, capture, prefix_hash=prefix_hash, length_penalty=penalty))
    return ends


def _length_penalty(plan: Plan, capture: Capture) -> float | None:
    """Return the trainer's own length penalty; None without a length range or without token ids."""
    if plan.length_range is None or not capture.output_ids:
        return None
    return length_penalty(len(capture.output_ids), *plan.length_range)


def _completion_body(plan: Plan, outcomes: Sequence[ChoiceOutcome]) -> dict[str, Any]:
    completions = [outcome.completion for outcome in outcomes if outcome.completion is not None]
    choices = [
        {
            "index": index,
            "message": {"refusal": None, **completion.message},
            "logprobs": completion.logprobs,
            "finish_reason": completion.finish_reason,
        }
        for index, completion in enumerate(completions)
    ]
    return {
        "id": plan.id,
        "object": "chat.completion",
        "created": plan.created,
        "model": plan.label,
        "choices": choices,
        "usage": sum_usage([completion.usage for completion in completions]),
    }
