"""/v1/events/stream: new turns, feedback, versions and deployments of a project, as server-sent events.

Each stream reads the database once a second, at most MAX_ROWS of each kind, and reads on only when they are sent: so a
slow client holds no more than that. An event's id is the stream's position after it; a client that sends it back as
Last-Event-ID continues there.
"""

import asyncio
import re
import time
from collections.abc import AsyncIterator, Callable
from typing import Annotated, Any, NamedTuple, Self

import orjson
from fastapi import APIRouter, Depends, Header, Request
from sqlalchemy import func, or_, select, tuple_
from sqlalchemy.ext.asyncio import AsyncSession
from starlette.responses import StreamingResponse

from app.core.database import Database, database_time
from app.core.draining_server import is_draining
from app.core.errors import ERROR_RESPONSES, AttuneError, BadRequest, RateLimited
from app.core.http import EVENT_STREAM, services_of, settings_of
from app.core.rate_limits import RateLimiter
from app.feedback.schemas import WITHDRAWAL
from app.models import Audit, AuditChain, Feedback, Origin, Policy, Turn, Version
from app.policies.references import format_reference
from app.projects.auth import DatabaseDep, ViewingCaller, authenticate

router = APIRouter(prefix="/v1/events", tags=["status"], responses=ERROR_RESPONSES)
MAX_ROWS = 100  # of each kind, each time
MAX_STREAMS = 50  # of a process
POLL_SECONDS = 1.0
HEARTBEAT_SECONDS = 15.0
SETTLE_SECONDS = 1.0  # turns that are younger may have older ones that are not committed yet
SUBJECTS = ("batch", "canary", "deployment", "shadow", "training", "version")  # whose audit entries are events
_POSITION = re.compile(r"(\d{1,18})-(\d{1,18})-(\d{1,12}\.\d{1,17})-([\w-]{0,48})")


class Position(NamedTuple):
    """Up to where a stream has been read: feedback, audit entries, and turns by time and id."""

    feedback_seq: int
    chain_number: int
    turn_time: float
    turn_id: str

    def __str__(self) -> str:
        return f"{self.feedback_seq}-{self.chain_number}-{self.turn_time!r}-{self.turn_id}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Raises BadRequest for an id that no event has."""
        match = _POSITION.fullmatch(text)
        if match is None:
            message = f"No event has the id '{text}'; leave out Last-Event-ID to begin with what is new."
            raise BadRequest(message, param="Last-Event-ID", code="invalid_value")
        return cls(int(match[1]), int(match[2]), float(match[3]), match[4])


class OpenStreams:
    """The number of streams that this process serves."""

    def __init__(self) -> None:
        self.count = 0


async def stream_slot(request: Request, caller: ViewingCaller) -> AsyncIterator[None]:
    """Count the stream among those of the caller's project until it ends. Raises RateLimited."""
    limit = settings_of(request).limits.max_event_streams
    message = f"This project may have {limit} event streams open at a time, and has; close one."
    with (
        services_of(request)
        .get(RateLimiter)
        .concurrent(f"stream:{caller.project_id}", limit, message, "too_many_streams")
    ):
        yield


@router.get("/stream", response_class=StreamingResponse, responses={200: {"content": EVENT_STREAM}})
async def stream(
    request: Request,
    caller: ViewingCaller,
    db: DatabaseDep,
    slot: Annotated[None, Depends(stream_slot)],
    last_event_id: Annotated[str | None, Header(max_length=128)] = None,
) -> StreamingResponse:
    """Stream what happens from now on, or since the event `Last-Event-ID`, as events `turn`, `feedback` and `audit`."""
    streams = services_of(request).get(OpenStreams)
    if streams.count >= MAX_STREAMS:
        message = f"This process serves {MAX_STREAMS} event streams already; close one, or ask again later."
        raise RateLimited(message, code="too_many_streams", retry_after=60)
    if last_event_id is not None:
        position = Position.parse(last_event_id)
    else:
        async with db.read_snapshot() as session:
            position = await read_end(session, caller.project_id)

    async def is_over() -> bool:
        if is_draining(request.scope):
            return True
        try:
            await authenticate(request, db, "viewer")  # a revoked key's stream ends
        except AttuneError:
            return True
        return False

    async def body() -> AsyncIterator[bytes]:
        streams.count += 1
        try:
            async for chunk in stream_events(db, caller.project_id, position, is_over):
                yield chunk
        finally:
            streams.count -= 1

    return StreamingResponse(body(), headers={"cache-control": "no-store"}, media_type="text/event-stream")


async def stream_events(
    db: Database, project_id: str, position: Position, is_over: Callable[[], Any]
) -> AsyncIterator[bytes]:
    """Yield the events after `position`, and comments while there are none, until `is_over` says so."""
    yield b"retry: 1000\n\n"
    sent_at = time.monotonic()
    while not await is_over():
        async with db.read_snapshot() as session:
            events, position = await read_events(session, project_id, position)
        for chunk in events:
            yield chunk
        if events:
            sent_at = time.monotonic()
        elif time.monotonic() - sent_at >= HEARTBEAT_SECONDS:
            yield b": heartbeat\n\n"
            sent_at = time.monotonic()
        if len(events) < MAX_ROWS:
            await asyncio.sleep(POLL_SECONDS)


async def read_end(session: AsyncSession, project_id: str) -> Position:
    """Return the position after all that is there."""
    seq = await session.scalar(select(func.max(Feedback.seq)).where(Feedback.project_id == project_id))
    chain = await session.get(AuditChain, project_id)
    return Position(seq or 0, chain.number if chain else 0, await database_time(session) - SETTLE_SECONDS, "")


async def read_events(session: AsyncSession, project_id: str, position: Position) -> tuple[list[bytes], Position]:
    """Return the next events, written, and the position after them."""
    events: list[bytes] = []

    def add(kind: str, data: dict[str, object], after: Position) -> Position:
        events.append(f"id: {after}\nevent: {kind}\ndata: ".encode() + orjson.dumps(data) + b"\n\n")
        return after

    settled = await database_time(session) - SETTLE_SECONDS
    turns = (
        select(Turn.id, Turn.completion_id, Turn.choice_index, Turn.conversation_id, Turn.route_reason, Turn.created_at)
        .add_columns(Policy.name, Version.number)
        .join(Policy, Policy.id == Turn.policy_id)
        .join(Version, Version.id == Turn.version_id)
        .where(Turn.project_id == project_id, Turn.origin == Origin.CHAT, Turn.created_at <= settled)
        .where(tuple_(Turn.created_at, Turn.id) > tuple_(position.turn_time, position.turn_id))
        .order_by(Turn.created_at, Turn.id)
        .limit(MAX_ROWS)
    )
    for row in (await session.execute(turns)).mappings():
        data = {name: row[name] for name in row if name not in ("name", "number")}
        data["version"] = format_reference(row["name"], row["number"])
        position = add("turn", data, position._replace(turn_time=row["created_at"], turn_id=row["id"]))
    columns = ("id", "turn_id", "conversation_id", "kind", "name", "value", "source_kind", "created_at")
    feedback = select(Feedback.seq, *(getattr(Feedback, name) for name in columns)).where(
        Feedback.project_id == project_id, Feedback.seq > position.feedback_seq, Feedback.kind != WITHDRAWAL
    )
    for row in (await session.execute(feedback.order_by(Feedback.seq).limit(MAX_ROWS))).mappings():
        data = {name: row[name] for name in columns}
        position = add("feedback", data, position._replace(feedback_seq=row["seq"]))
    is_event = or_(*(Audit.action.startswith(f"{subject}.") for subject in SUBJECTS))
    entries = select(Audit).where(Audit.project_id == project_id, Audit.chain_number > position.chain_number, is_event)
    for entry in await session.scalars(entries.order_by(Audit.chain_number).limit(MAX_ROWS)):
        names = ("action", "subject", "actor", "reason", "created_at")
        data = {"number": entry.chain_number} | {name: getattr(entry, name) for name in names}
        position = add("audit", data, position._replace(chain_number=entry.chain_number or 0))
    return events, position
