"""Answer: plan a completion, ask the engine, put the turns on record. For every wire that speaks through chat."""

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import anyio
from starlette.requests import ClientDisconnect, Request

from alignment.signals.length_penalty import length_penalty
from app.chat import conversations
from app.chat.fanout import Outcome, StreamFanout, UnaryFanout, total
from app.chat.planning import Asked, Plan, plan
from app.chat.schemas import ChatRequest
from app.chat.turn_writer import STOPPED, TurnEnd, TurnWriter
from app.core.database import Database
from app.core.errors import AttuneError
from app.core.services import services_of, settings_of
from app.core.settings import Settings
from app.deployments.resolution import VersionNotLoaded
from app.deployments.router import VersionRouter
from app.inference.capture import Capture
from app.inference.pool import EnginePool
from app.models import TurnState
from app.projects.auth import Caller

HUNG_UP = "client_disconnect"
AGAIN_SECONDS, LONGEST_SECONDS = 0.02, 0.25
T = TypeVar("T")


@dataclass(frozen=True)
class Answer:
    """`body` is OpenAI's chat.completion."""

    body: dict[str, Any]
    headers: dict[str, str]


@dataclass(frozen=True)
class Streamed:
    """`chunks` are OpenAI's chat.completion.chunk. The iterator raises AttuneError if the reply breaks off; closing it
    early ends the engine's work and records what was said."""

    chunks: AsyncGenerator[dict[str, Any], None]
    headers: dict[str, str]


async def whole(request: Request, caller: Caller, asked: ChatRequest) -> Answer:
    """One reply at once. A client that hangs up ends the engine's work too; what was said is still recorded."""
    return await _held(request, lambda: _whole(request, caller, asked))


async def stream(request: Request, caller: Caller, asked: ChatRequest) -> Streamed:
    """A reply as it comes. Returns when the engine has begun: what it refuses is raised, not streamed."""
    return await _held(request, lambda: _stream(request, caller, asked))


async def _held(request: Request, answer: Callable[[], Awaitable[T]]) -> T:
    """While an engine's own weights are exchanged, nobody is refused: who asks waits."""
    settings = settings_of(request)
    until, pause = (
        time.monotonic() + (settings.weight_swap_wait_seconds if settings.adaptation == "full" else 0.0),
        AGAIN_SECONDS,
    )
    while True:
        try:
            return await answer()
        except VersionNotLoaded:
            if time.monotonic() >= until:
                raise
        await asyncio.sleep(pause)
        pause = min(2 * pause, LONGEST_SECONDS)


async def _whole(request: Request, caller: Caller, asked: ChatRequest) -> Answer:
    records = _records(request)
    planned = await _plan(request, caller, asked)
    replies = UnaryFanout(planned.client, planned.calls)
    if planned.opening.holder is not None:  # the engine is asked when it is sure whose weights it has
        await records.open(planned.opening)
    replies.start()
    try:
        if planned.opening.holder is None:
            await records.open(planned.opening)
    except BaseException:
        await replies.drop()
        raise
    hung_up = asyncio.Event()
    watch = asyncio.create_task(_watch(request, replies, hung_up))
    try:
        outcomes = await replies.outcomes()
    except asyncio.CancelledError:  # the server is stopping
        await replies.drop()
        await _close(records, [TurnEnd(call.rid, TurnState.ABORTED, None, STOPPED) for call in planned.calls])
        raise
    finally:
        watch.cancel()
    error = next((outcome.error for outcome in outcomes if outcome.error), None)
    captures = [outcome.completion.capture if outcome.completion else None for outcome in outcomes]
    await _close(records, _endings(planned, captures, error or (ClientDisconnect() if hung_up.is_set() else None)))
    if error is not None:
        error.headers |= planned.headers
        raise error
    return Answer(_body(planned, outcomes), planned.headers)


async def _stream(request: Request, caller: Caller, asked: ChatRequest) -> Streamed:
    records = _records(request)
    planned = await _plan(request, caller, asked)
    choices = StreamFanout(planned.client, planned.calls)
    opened = planned.opening.holder is not None
    if opened:
        await records.open(planned.opening)
    choices.start()
    try:
        if not opened:
            await records.open(planned.opening)
        opened = True
        await _begun(request, choices)
    except BaseException as error:
        await choices.leave()
        if opened:
            await _close(records, _endings(planned, choices.captures(), error))
        if isinstance(error, AttuneError):
            error.headers |= planned.headers
        raise
    chunks = _chunks(records, planned, choices)
    await anext(chunks)  # one that was never entered would never clean up
    return Streamed(chunks, planned.headers)


async def _chunks(records: TurnWriter, planned: Plan, choices: StreamFanout) -> AsyncGenerator[dict[str, Any], None]:
    named = {"id": planned.id, "model": planned.label, "created": planned.created}
    trouble: BaseException | None = None
    try:
        yield {}
        async for chunk in choices:
            yield chunk | named
    except BaseException as error:
        trouble = error
        raise
    finally:
        await choices.leave()
        await _close(records, _endings(planned, choices.captures(), trouble))


async def _plan(request: Request, caller: Caller, asked: ChatRequest) -> Plan:
    services = services_of(request)
    routes = services.get(VersionRouter)
    found = await routes.find(caller.project_id, asked.model)
    heard = Asked.of(asked, request.headers)
    db, engines, settings = services.get(Database), services.get(EnginePool), services.get(Settings)
    return await plan(db, engines, settings, caller, routes, found, heard)


def _records(request: Request) -> TurnWriter:
    return services_of(request).get(TurnWriter)


async def _begun(request: Request, choices: StreamFanout) -> None:
    """Behind a long queue the first token may take minutes: a client that gives up takes its request along."""
    begun, gone = asyncio.create_task(choices.begun()), asyncio.create_task(_gone(request))
    try:
        await asyncio.wait((begun, gone), return_when=asyncio.FIRST_COMPLETED)
        if not begun.done():
            raise ClientDisconnect
        await begun
    finally:
        gone.cancel()
        begun.cancel()


async def _gone(request: Request) -> None:
    """The body has been read: all that can still come from the client is that it is gone."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _watch(request: Request, replies: UnaryFanout, hung_up: asyncio.Event) -> None:
    await _gone(request)
    hung_up.set()
    replies.end()


async def _close(records: TurnWriter, endings: Sequence[TurnEnd]) -> None:
    with anyio.CancelScope(shield=True):
        await asyncio.gather(*(records.close(ending) for ending in endings))


def _endings(planned: Plan, captures: Sequence[Capture | None], trouble: BaseException | None) -> list[TurnEnd]:
    """Trouble is an error of ours or the engine's; anything else is a client that left."""
    if isinstance(trouble, AttuneError):
        return _broken(planned, captures, TurnState.FAILED, "error", str(trouble))
    if trouble is not None:
        return _broken(planned, captures, TurnState.ABORTED, HUNG_UP, None)
    return _done(planned, captures)


def _broken(
    planned: Plan, captures: Sequence[Capture | None], state: TurnState, reason: str, exclusion_reason: str | None
) -> list[TurnEnd]:
    return [
        TurnEnd(call.rid, state, capture, reason, exclusion_reason)
        for call, capture in zip(planned.calls, captures, strict=True)
    ]


def _done(planned: Plan, captures: Sequence[Capture | None]) -> list[TurnEnd]:
    endings = []
    for call, capture in zip(planned.calls, captures, strict=True):
        assert capture is not None, f"{call.rid} ended without a capture"
        prefix_hash = conversations.hashes([*call.messages, capture.message])[-1]
        ending = TurnEnd(
            call.rid, TurnState.DONE, capture, prefix_hash=prefix_hash, length_penalty=_penalty(planned, capture)
        )
        endings.append(ending)
    return endings


def _penalty(planned: Plan, capture: Capture) -> float | None:
    """The trainer's own measure. Nothing can be said of a reply whose tokens the engine did not tell."""
    if planned.length_range is None or not capture.output_ids:
        return None
    return length_penalty(len(capture.output_ids), *planned.length_range)


def _body(planned: Plan, outcomes: Sequence[Outcome]) -> dict[str, Any]:
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
        "id": planned.id,
        "object": "chat.completion",
        "created": planned.created,
        "model": planned.label,
        "choices": choices,
        "usage": total([completion.usage for completion in completions]),
    }
