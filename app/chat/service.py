"""Answer a chat request: plan it, record its turns, run it on the engine, record how it ended.

Every wire format (chat completions, responses, messages) goes through `ChatService`.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import anyio
from starlette.requests import ClientDisconnect

from alignment.signals.rules import length_penalty
from app.chat import conversations
from app.chat.fanout import StreamFanout, UnaryFanout, sum_usage
from app.chat.histories import count_common
from app.chat.planning import ChatPlanner, Plan
from app.chat.request_origin import Disconnected, RequestOrigin
from app.chat.schemas import ChatRequest
from app.chat.turn_writer import SERVER_STOPPED, TurnEnd, TurnWriter
from app.chat.wire_details import NO_DETAILS, WireDetails
from app.core.database import Database
from app.core.errors import AttuneError, database_unavailable, is_database_outage
from app.core.request_log import add_log_fields
from app.core.settings import Settings
from app.deployments.routes import VersionNotLoaded
from app.deployments.version_router import VersionRouter
from app.engines.adaptation import adaptation_of
from app.inference.capture import Capture
from app.inference.engine import Completion
from app.inference.pool import EnginePool
from app.inference.request import ChatCall, Sampling
from app.inference.transport import EngineRefused, EngineTimeout, EngineUnavailable
from app.models import ENGINE_REFUSED, ServiceTier, TurnState
from app.projects.auth import Caller

log = logging.getLogger("attune.chat")
CLIENT_DISCONNECT = "client_disconnect"
REFUSED = "refused"
RETRY_MIN_SECONDS, RETRY_MAX_SECONDS = 0.02, 0.25
T = TypeVar("T")
F = TypeVar("F", UnaryFanout, StreamFanout)
Chunks = AsyncGenerator[dict[str, Any], None]


@dataclass(frozen=True)
class Reply(Generic[T]):
    """A reply with its headers: OpenAI's chat.completion, or an iterator of chat.completion.chunk objects.

    The iterator raises AttuneError if the reply breaks off. Closing it early aborts the engine's work and records
    what was generated until then.
    """

    content: T
    headers: dict[str, str]
    sampling: Sampling  # what it is sampled with
    service_tier: ServiceTier | None  # what it is served with; None: nobody has asked for one


class ChatService:
    """Answers the chats of one process: plans them, records their turns and runs them on engines."""

    def __init__(
        self, db: Database, router: VersionRouter, writer: TurnWriter, engines: EnginePool, settings: Settings
    ) -> None:
        self._planner = ChatPlanner(db, router, engines, settings)
        self._writer = writer
        self._wait_seconds = adaptation_of(settings).wait_seconds(settings)

    async def complete(
        self,
        caller: Caller,
        chat_request: ChatRequest,
        origin: RequestOrigin,
        disconnected: Disconnected,
        details: WireDetails = NO_DETAILS,
    ) -> Reply[dict[str, Any]]:
        """Return a whole reply. If the client disconnects, abort the engine's work and record what was generated."""
        return await self._retry_during_weight_swap(
            lambda: self._complete(caller, chat_request, origin, disconnected, details)
        )

    async def stream(
        self,
        caller: Caller,
        chat_request: ChatRequest,
        origin: RequestOrigin,
        disconnected: Disconnected,
        details: WireDetails = NO_DETAILS,
    ) -> Reply[Chunks]:
        """Return a reply as a stream, once every choice has its first token; what the engine refuses is raised."""
        return await self._retry_during_weight_swap(
            lambda: self._stream(caller, chat_request, origin, disconnected, details)
        )

    async def _retry_during_weight_swap(self, answer: Callable[[], Awaitable[T]]) -> T:
        """Call `answer` again while no engine holds the version; full weights are missing while a swap lasts."""
        deadline = time.monotonic() + self._wait_seconds
        pause = RETRY_MIN_SECONDS
        while True:
            try:
                return await answer()
            except VersionNotLoaded:
                if time.monotonic() >= deadline:
                    raise
            await asyncio.sleep(pause)
            pause = min(2 * pause, RETRY_MAX_SECONDS)

    async def _complete(
        self,
        caller: Caller,
        chat_request: ChatRequest,
        origin: RequestOrigin,
        disconnected: Disconnected,
        details: WireDetails,
    ) -> Reply[dict[str, Any]]:
        plan, fanout = await self._start(caller, chat_request, origin, details, UnaryFanout)
        outcomes, has_left = await self._wait_for_outcomes(plan, fanout, disconnected)
        error = _first_error(outcomes)
        if not has_left and (spare_plan := _with_spare_engine(plan, error)) is not None:
            await fanout.close()  # the engine may still generate
            plan, fanout = spare_plan, UnaryFanout(spare_plan.engine.client, plan.calls)
            fanout.start()
            outcomes, has_left = await self._wait_for_outcomes(plan, fanout, disconnected)
            error = _first_error(outcomes)
        captures = [outcome.capture if isinstance(outcome, Completion) else None for outcome in outcomes]
        cause = error or (ClientDisconnect() if has_left else None)
        await self._record_ends(_turn_ends(plan, captures, cause))
        if error is not None:
            error.headers |= plan.headers
            raise error
        completions = [outcome for outcome in outcomes if isinstance(outcome, Completion)]
        return Reply(_completion_body(plan, completions), plan.headers, plan.calls[0].sampling, plan.service_tier)

    async def _wait_for_outcomes(
        self, plan: Plan, fanout: UnaryFanout, disconnected: Disconnected
    ) -> tuple[list[Completion | AttuneError], bool]:
        """Return what became of each choice, and whether the client has left."""
        disconnect = asyncio.create_task(_abort_on_disconnect(disconnected, fanout))
        try:
            outcomes = await fanout.wait()
        except asyncio.CancelledError:  # the server is stopping
            await fanout.close()
            await self._record_ends([TurnEnd(call.rid, TurnState.ABORTED, None, SERVER_STOPPED) for call in plan.calls])
            raise
        finally:
            disconnect.cancel()  # a task that is done stays so
        return outcomes, disconnect.done()

    async def _stream(
        self,
        caller: Caller,
        chat_request: ChatRequest,
        origin: RequestOrigin,
        disconnected: Disconnected,
        details: WireDetails,
    ) -> Reply[Chunks]:
        plan, fanout = await self._start(caller, chat_request, origin, details, StreamFanout)
        is_started = False
        while not is_started:
            try:
                await _wait_for_first_token(disconnected, fanout)
                is_started = True
            except BaseException as error:
                await fanout.close()
                if (spare_plan := _with_spare_engine(plan, error)) is None:
                    await self._record_ends(_turn_ends(plan, fanout.captures(), error))
                    if isinstance(error, AttuneError):
                        error.headers |= plan.headers
                    raise
                plan, fanout = spare_plan, StreamFanout(spare_plan.engine.client, plan.calls)
                fanout.start()
        chunks = self._chunks(plan, fanout)
        await anext(chunks)  # enters the generator, so that closing it runs its clean-up
        return Reply(chunks, plan.headers, plan.calls[0].sampling, plan.service_tier)

    async def _start(
        self,
        caller: Caller,
        chat_request: ChatRequest,
        origin: RequestOrigin,
        details: WireDetails,
        fanout_type: type[F],
    ) -> tuple[Plan, F]:
        """Plan the completion and record its turns while the engine begins.

        With full weights the turns are recorded first: only then are the weights certain.
        """
        plan = await self._planner.plan(caller, chat_request, origin, details)
        add_log_fields(turn=plan.id, policy=plan.label.partition("@")[0], version=plan.label)
        fanout = fanout_type(plan.engine.client, plan.calls)
        is_recorded = plan.turn_start.required_weights is not None
        if is_recorded:
            await self._writer.record_start(plan.turn_start)
        fanout.start()
        try:
            if not is_recorded:
                await self._writer.record_start(plan.turn_start)
        except BaseException:
            await fanout.close()
            raise
        return plan, fanout

    async def _chunks(self, plan: Plan, fanout: StreamFanout) -> Chunks:
        """Yield one empty item, then the chunks; record the ends of the turns when the generator is left."""
        frame = {
            "id": plan.id,
            "model": plan.label,
            "created": plan.created,
            "system_fingerprint": plan.system_fingerprint,
            **_tier_field(plan),
        }
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
            await self._record_ends(_turn_ends(plan, fanout.captures(), cause))

    async def _record_ends(self, ends: Sequence[TurnEnd]) -> None:
        """Record the ends of all turns. Raises Unavailable if the database is away for long: a stream ends with it."""
        with anyio.CancelScope(shield=True):
            results = await asyncio.gather(*(self._writer.record_end(end) for end in ends), return_exceptions=True)
        for error in results:
            if isinstance(error, BaseException):
                raise database_unavailable() if is_database_outage(error) else error


def _first_error(outcomes: Sequence[Completion | AttuneError]) -> AttuneError | None:
    return next((outcome for outcome in outcomes if isinstance(outcome, AttuneError)), None)


def _with_spare_engine(plan: Plan, error: BaseException | None) -> Plan | None:
    """Return the plan for another engine if this one cannot be reached, or has failed, and there is another one.

    An engine that has not answered in time is no reason: the client has waited long enough.
    """
    if plan.spare_engine is None or not isinstance(error, EngineUnavailable) or isinstance(error, EngineTimeout):
        return None
    log.warning(
        "engine %s failed before the first byte, %s is tried: %s", plan.engine.name, plan.spare_engine.name, error
    )
    return replace(plan, engine=plan.spare_engine, spare_engine=None)


async def _wait_for_first_token(disconnected: Disconnected, fanout: StreamFanout) -> None:
    """Raise ClientDisconnect if the client leaves first: in a long queue the first token may take minutes."""
    started = asyncio.create_task(fanout.wait_until_started())
    left = asyncio.ensure_future(disconnected())
    try:
        await asyncio.wait((started, left), return_when=asyncio.FIRST_COMPLETED)
        if not started.done():
            raise ClientDisconnect
        await started
    finally:
        left.cancel()
        started.cancel()


async def _abort_on_disconnect(disconnected: Disconnected, fanout: UnaryFanout) -> None:
    await disconnected()
    fanout.abort()


def _turn_ends(plan: Plan, captures: Sequence[Capture | None], cause: BaseException | None) -> list[TurnEnd]:
    """Return how each turn ended. An AttuneError means failure; any other `cause` means that the client left.

    What the engine refuses before its first token is no failure: the request is to blame, and no version.
    """
    pairs = zip(plan.calls, captures, strict=True)
    if cause is None:
        ends = [_finished_end(plan, call, capture) for call, capture in pairs]
        return _refer_to_histories(plan, ends)
    state, finish_reason, exclusion_reason = TurnState.ABORTED, CLIENT_DISCONNECT, None
    has_output = any(capture is not None and capture.has_output for capture in captures)
    if isinstance(cause, EngineRefused) and cause.is_fault_of_request and not has_output:
        state, finish_reason, exclusion_reason = TurnState.REFUSED, REFUSED, f"{ENGINE_REFUSED}: {cause}"
    elif isinstance(cause, AttuneError):
        state, finish_reason, exclusion_reason = TurnState.FAILED, "error", str(cause)
    ends = [TurnEnd(call.rid, state, capture, finish_reason, exclusion_reason) for call, capture in pairs]
    return _refer_to_histories(plan, ends)


def _refer_to_histories(plan: Plan, ends: Sequence[TurnEnd]) -> list[TurnEnd]:
    """Return the ends with the number of prompt tokens that the turns' histories have, and the engine."""
    referring = []
    for end, turn in zip(ends, plan.turn_start.turns, strict=True):
        history_id = turn.history_id
        tokens: Sequence[int] = ()
        if plan.history is not None and history_id == plan.history.turn_id:
            tokens = plan.history.token_ids
        elif history_id == plan.id and ends[0].capture is not None:
            tokens = ends[0].capture.prompt_ids
        num_tokens = count_common(tokens, end.capture.prompt_ids) if end.capture is not None else 0
        referring.append(replace(end, history_id=history_id, num_history_tokens=num_tokens, engine=plan.engine.name))
    return referring


def _finished_end(plan: Plan, call: ChatCall, capture: Capture | None) -> TurnEnd:
    """The length penalty is the trainer's own; None without a length range or without token ids."""
    assert capture is not None, f"turn {call.rid} ended without a capture"
    prefix_hash = conversations.prefix_hashes([*call.messages, capture.message])[-1]
    penalty = None
    if plan.length_range is not None and capture.output_ids:
        penalty = length_penalty(len(capture.output_ids), *plan.length_range)
    return TurnEnd(call.rid, TurnState.DONE, capture, prefix_hash=prefix_hash, length_penalty=penalty)


def _completion_body(plan: Plan, completions: Sequence[Completion]) -> dict[str, Any]:
    choices = [
        {
            "index": index,
            "message": {"refusal": None, **completion.capture.message},
            "logprobs": completion.logprobs,
            "finish_reason": completion.capture.finish_reason,
            **({"matched_stop": completion.matched_stop} if plan.calls[index].names_stop_text else {}),
        }
        for index, completion in enumerate(completions)
    ]
    return {
        "id": plan.id,
        "object": "chat.completion",
        "created": plan.created,
        "model": plan.label,
        "system_fingerprint": plan.system_fingerprint,
        **_tier_field(plan),
        "choices": choices,
        "usage": sum_usage([completion.usage for completion in completions]),
    }


def _tier_field(plan: Plan) -> dict[str, str]:
    return {} if plan.service_tier is None else {"service_tier": plan.service_tier}
