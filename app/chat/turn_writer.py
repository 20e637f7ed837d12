"""Turns on record: a row before the first byte leaves, closed when the reply ends, however it ends."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import bindparam, func, insert, or_, select, update
from sqlalchemy.engine import Connection

from app.core.database import Database, now
from app.core.errors import AttuneError
from app.core.group_commit import GroupCommit
from app.core.telemetry import Telemetry
from app.deployments.resolution import VersionNotLoaded
from app.inference.capture import Capture
from app.models import LOST_REASON, SERVER_LOST, Engine, Turn, TurnMetadata, TurnState


@dataclass(frozen=True)
class Holder:
    """An engine that was found to have a version's full weights."""

    engine: str
    weights: str | None
    label: str


@dataclass(frozen=True)
class TurnStart:
    """One completion's turns. `replaced`: turns of the same request whose reply its client gave up. `holder`: they are
    put on record only if it has those weights still."""

    turns: list[dict[str, Any]]
    pairs: list[dict[str, Any]] = field(default_factory=list)
    replaced: tuple[str, ...] = ()
    holder: Holder | None = None


@dataclass(frozen=True)
class TurnEnd:
    """How one turn ended. `capture` is None when the engine gave nothing; `flaw` is why it must not be trained on."""

    turn_id: str
    state: TurnState
    capture: Capture | None = None
    finish_reason: str | None = None
    exclusion_reason: str | None = None
    prefix_hash: str | None = None
    length_penalty: float | None = None

    @property
    def num_output_tokens(self) -> int | None:
        return None if self.capture is None else len(self.capture.output_ids)

    def values(self) -> dict[str, Any]:
        capture = self.capture
        return {
            "b_id": self.turn_id,
            "b_state": self.state,
            "b_prompt_ids": capture and capture.prompt_ids,
            "b_output_ids": capture and capture.output_ids,
            "b_logprobs": capture and capture.logprobs,
            "b_num_prompt_tokens": capture and len(capture.prompt_ids),
            "b_num_output_tokens": self.num_output_tokens,
            "b_reply": capture and storable(capture.message),
            "b_finish_reason": self.finish_reason or (capture and capture.finish_reason),
            # A reply that its client left is as good to learn from as any: no hiding place for what drives people away.
            "b_exclusion_reason": self.exclusion_reason
            or (self.finish_reason if capture is None else capture.exclusion_reason),
            "b_prefix_hash": self.prefix_hash,
            "b_length_penalty": self.length_penalty,
            "b_weight_versions": (capture.weight_versions if capture else None) or None,
        }


STOPPED = "server_stopped"
COLUMNS = (
    "state",
    "prompt_ids",
    "output_ids",
    "logprobs",
    "num_prompt_tokens",
    "num_output_tokens",
    "reply",
    "finish_reason",
    "prefix_hash",
    "length_penalty",
    "weight_versions",
)
INSERT = insert(Turn)
LOST = Turn.finish_reason == SERVER_LOST
CLOSE = (
    update(Turn)
    # A reply that outlived the sweep's patience was not lost after all.
    .where(Turn.id == bindparam("b_id"), or_(Turn.state == TurnState.OPEN, LOST), Turn.deleted_at.is_(None))
    .values(
        {name: bindparam(f"b_{name}") for name in COLUMNS}
        | {
            "finished_at": now(),
            "exclusion_reason": func.coalesce(
                func.nullif(Turn.exclusion_reason, LOST_REASON), bindparam("b_exclusion_reason")
            ),
        }
    )
)


class TurnWriter:
    """The turns of all requests of this process, written in groups: what opens and what ends share a commit."""

    def __init__(self, db: Database, telemetry: Telemetry) -> None:
        self._group_commit: GroupCommit[TurnStart | TurnEnd, None] = GroupCommit(db, write)
        self._telemetry = telemetry
        self._open: dict[str, str] = {}  # turns under way, and whose policy speaks

    async def open(self, opening: TurnStart) -> None:
        turns = {turn["id"]: turn["policy_id"] for turn in opening.turns}
        self._open |= turns
        try:
            await self._group_commit.submit(opening)
        except Exception:  # it is not on record; a caller that is cancelled leaves it there
            for id in turns:
                self._open.pop(id, None)
            raise

    async def close(self, ending: TurnEnd) -> None:
        try:
            await self._group_commit.submit(ending)
        finally:
            policy_id = self._open.pop(ending.turn_id, None)
        if policy_id is not None:
            self._telemetry.ended(policy_id, ending.state, ending.num_output_tokens, ending.length_penalty)

    async def settle(self, seconds: float) -> None:
        """Before the server goes: wait for the turns that are ending, and close those that will not."""
        until = time.monotonic() + seconds
        while self._open and time.monotonic() < until:
            await asyncio.sleep(0.05)
        left = [TurnEnd(id, TurnState.ABORTED, None, STOPPED) for id in self._open]
        await asyncio.gather(*(self.close(ending) for ending in left), return_exceptions=True)


def write(connection: Connection, items: Sequence[TurnStart | TurnEnd]) -> list[AttuneError | None]:
    late = _late(connection, [item for item in items if isinstance(item, TurnStart) and item.holder is not None])
    openings = [item for item in items if isinstance(item, TurnStart) and id(item) not in late]
    if openings:
        connection.execute(INSERT, [turn for opening in openings for turn in opening.turns])
    if pairs := [pair for opening in openings for pair in opening.pairs]:
        connection.execute(insert(TurnMetadata), pairs)
    for opening in openings:
        if opening.replaced:
            _replace(connection, opening)
    if endings := [item.values() for item in items if isinstance(item, TurnEnd)]:
        connection.execute(CLOSE, endings)
    return [late.get(id(item)) for item in items]


def _late(connection: Connection, openings: Sequence[TurnStart]) -> dict[int, AttuneError]:
    """By the opening's identity: what came when the weights were about to leave. Whoever takes them away first says
    so in the engine's row, then waits for the turns that are on record: so none is missed, and none misnamed."""
    if not openings:
        return {}
    names = {opening.holder.engine for opening in openings if opening.holder}
    rows = connection.execute(
        select(Engine.name, Engine.weights, Engine.swapping_until)
        .where(Engine.name.in_(names))
        .order_by(Engine.name)
        .with_for_update(read=True)
    )
    there = {row.name: row.weights for row in rows if row.swapping_until is None}
    return {
        id(opening): VersionNotLoaded(f"{opening.holder.label} has just left the engine; try again in a moment.")
        for opening in openings
        if opening.holder and there.get(opening.holder.engine, opening) != opening.holder.weights
    }


def _replace(connection: Connection, opening: TurnStart) -> None:
    told = f"its client asked again and got {opening.turns[0]['completion_id']} instead"
    connection.execute(
        update(Turn).where(Turn.id.in_(opening.replaced), Turn.exclusion_reason.is_(None)).values(exclusion_reason=told)
    )


def storable(value: Any) -> Any:
    """A byte-level model can say NUL, which PostgreSQL cannot hold as text. The token ids keep what was said."""
    if isinstance(value, str):
        return value.replace("\x00", "\ufffd")
    if isinstance(value, dict):
        return {key: storable(item) for key, item in value.items()}
    return [storable(item) for item in value] if isinstance(value, list) else value
