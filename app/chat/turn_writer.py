"""Write turns: a row is inserted before the first byte of a reply leaves, and finished when the reply ends."""

import asyncio
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sqlalchemy import Integer, bindparam, case, cast, func, insert, or_, select, update
from sqlalchemy.engine import Connection
from sqlalchemy.exc import SQLAlchemyError

from app.chat import episode_limits, histories
from app.chat.new_turn import NewTurn
from app.core.database import Database, now
from app.core.errors import AttuneError, is_database_outage
from app.core.group_commit import GroupCommit, ItemKey
from app.core.telemetry import Telemetry
from app.deployments.routes import VersionNotLoaded
from app.inference.capture import Capture
from app.models import LOST_REASON, SERVER_LOST, Engine, Turn, TurnMetadata, TurnState
from app.models.base import TokenIds


@dataclass(frozen=True)
class EngineWeights:
    """An engine and the full weights that it must hold for a turn to start."""

    engine: str
    weights: str | None
    label: str


@dataclass(frozen=True)
class TurnStart:
    """The new turns of one completion. Their `own_messages` hold the whole prompt; the writer leaves out what the turn
    `history_id` has, if it is there.

    `replaced_turn_ids`: turns of the same request whose reply the client gave up. `required_weights`: the turns are
    recorded only if this engine still holds these weights.
    """

    turns: Sequence[NewTurn]
    metadata: Sequence[Mapping[str, str]] = ()
    replaced_turn_ids: tuple[str, ...] = ()
    required_weights: EngineWeights | None = None


@dataclass(frozen=True)
class TurnEnd:
    """How one turn ended. `capture` is None when the engine returned nothing.

    `num_history_tokens`: how many of the captured prompt ids are those of the turn `history_id`.
    """

    turn_id: str
    state: TurnState
    capture: Capture | None = None
    finish_reason: str | None = None
    exclusion_reason: str | None = None
    prefix_hash: str | None = None
    length_penalty: float | None = None
    history_id: str | None = None
    num_history_tokens: int = 0
    engine: str | None = None  # None: the one that the turn began on

    @property
    def num_output_tokens(self) -> int | None:
        return None if self.capture is None else len(self.capture.output_ids)

    def values(self) -> dict[str, Any]:
        """Return the parameters of FINISH_TURNS: the values of columns, prefixed with "b_"."""
        capture = self.capture
        return {
            "b_id": self.turn_id,
            "b_state": self.state,
            "b_engine": self.engine,
            "b_history_id": self.history_id,
            "b_num_history_tokens": self.num_history_tokens,
            "b_added_prompt_ids": capture and capture.prompt_ids[self.num_history_tokens :],
            "b_prompt_ids": capture and capture.prompt_ids,
            "b_output_ids": capture and capture.output_ids,
            "b_logprobs": capture and capture.logprobs,
            "b_num_prompt_tokens": capture and len(capture.prompt_ids),
            "b_num_output_tokens": self.num_output_tokens,
            "b_reply": capture and replace_nul(capture.message),
            "b_finish_reason": self.finish_reason or (capture and capture.finish_reason),
            # A reply whose client disconnected stays trainable: else replies that drive users away would escape.
            "b_exclusion_reason": self.exclusion_reason
            or (self.finish_reason if capture is None else capture.exclusion_reason),
            "b_prefix_hash": self.prefix_hash,
            "b_length_penalty": self.length_penalty,
            "b_weight_versions": (capture.weight_versions if capture else None) or None,
        }


SERVER_STOPPED = "server_stopped"
END_RETRY_SECONDS = 10.0  # no new attempt begins after this
END_RETRY_MIN_PAUSE, END_RETRY_MAX_PAUSE = 0.1, 1.0
UNRECORDED_PAUSE = 1.0  # seconds between two attempts to close the turns that an outage left open
MAX_UNRECORDED = 10_000  # beyond that, the reconciler closes them later
DATABASE_AWAY = "the database was away when the reply began or ended"
INSERT_TURNS = insert(Turn)
MARKED_LOST = Turn.finish_reason == SERVER_LOST
PROMPT_PARAMETERS = {"b_history_id", "b_num_history_tokens", "b_added_prompt_ids", "b_prompt_ids"}
COMPUTED = {"b_id", "b_exclusion_reason", "b_engine"}
FINISHED_COLUMNS = TurnEnd("", TurnState.DONE).values().keys() - COMPUTED - PROMPT_PARAMETERS
HAS_HISTORY = histories.is_recorded(bindparam("b_history_id", type_=Turn.history_id.type))
FINISH_TURNS = (
    update(Turn)
    # A turn that the reconciler marked as lost may still end.
    .where(Turn.id == bindparam("b_id"), or_(Turn.state == TurnState.OPEN, MARKED_LOST), Turn.deleted_at.is_(None))
    .values(
        {name.removeprefix("b_"): bindparam(name) for name in FINISHED_COLUMNS}
        | {
            # The history may have been erased since the turn began.
            "own_prompt_ids": case(
                (HAS_HISTORY, cast(bindparam("b_added_prompt_ids", type_=TokenIds), TokenIds)),
                else_=cast(bindparam("b_prompt_ids", type_=TokenIds), TokenIds),
            ),
            "num_history_tokens": case((HAS_HISTORY, bindparam("b_num_history_tokens", type_=Integer)), else_=0),
            "finished_at": now(),
            "engine": func.coalesce(bindparam("b_engine", type_=Turn.engine.type), Turn.engine),
            "exclusion_reason": func.coalesce(
                func.nullif(Turn.exclusion_reason, LOST_REASON), bindparam("b_exclusion_reason")
            ),
        }
    )
)


def key_of(item: TurnStart | TurnEnd) -> ItemKey:
    """Return what the item may wait for: the lock of its turn, or that of the episode of new turns."""
    if isinstance(item, TurnEnd):
        return ItemKey(None, item.turn_id)
    first = item.turns[0]
    return ItemKey(None, first.episode_id or first.id)


class TurnWriter:
    """Writes the turns of all requests of one process; turns that start and turns that end share commits."""

    def __init__(self, db: Database, telemetry: Telemetry) -> None:
        self._group_commit: GroupCommit[TurnStart | TurnEnd, None] = GroupCommit(db, write_group, key=key_of)
        self._telemetry = telemetry
        self._open: dict[str, str] = {}  # turn id -> policy id of each running turn
        self._unrecorded: dict[str, TurnEnd] = {}  # by turn id
        self._closer: asyncio.Task[None] | None = None

    async def record_start(self, start: TurnStart) -> None:
        """Insert the turns and return when they are committed.

        Raises VersionNotLoaded if the weights have changed, and Conflict if the episode of the turns has ended.
        """
        policy_ids = {turn.id: turn.policy_id for turn in start.turns}
        self._open |= policy_ids
        try:
            await self._group_commit.submit(start)
        except Exception as error:  # the rows may be written if the caller was cancelled instead
            for id in policy_ids:
                self._open.pop(id, None)
            if is_database_outage(error):  # the answer to the commit may have been lost
                self._close_later(policy_ids)
            raise

    async def record_end(self, end: TurnEnd) -> None:
        """Finish one turn and return when it is committed.

        While the database is away this is tried again for `END_RETRY_SECONDS`, since the reply exists already: it is
        held, or its stream stays open. A repetition is harmless, because only an open turn is finished. Raises the
        database's error after that, and the turn fails when the database is back.
        """
        deadline, pause = time.monotonic() + END_RETRY_SECONDS, END_RETRY_MIN_PAUSE
        try:
            while True:
                try:
                    await self._group_commit.submit(end)
                    break
                except SQLAlchemyError as error:
                    if not is_database_outage(error):
                        raise
                    if time.monotonic() + pause > deadline:
                        self._close_later([end.turn_id])
                        raise
                await asyncio.sleep(pause)
                pause = min(2 * pause, END_RETRY_MAX_PAUSE)
        finally:
            policy_id = self._open.pop(end.turn_id, None)
        if policy_id is not None:
            self._telemetry.record_turn(policy_id, end.state, end.num_output_tokens, end.length_penalty)

    async def drain(self, seconds: float) -> None:
        """Wait up to `seconds` for running turns at shutdown, then record the remaining ones as aborted."""
        deadline = time.monotonic() + seconds
        while self._open and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        remaining = [TurnEnd(id, TurnState.ABORTED, None, SERVER_STOPPED) for id in self._open]
        await asyncio.gather(*(self.record_end(end) for end in remaining), return_exceptions=True)
        if self._closer is not None:
            self._closer.cancel()
            await asyncio.wait([self._closer])

    def _close_later(self, turn_ids: Iterable[str]) -> None:
        """Let turns fail as soon as the database answers: their replies were not delivered, or not as a whole."""
        for id in turn_ids:
            if len(self._unrecorded) < MAX_UNRECORDED:
                self._unrecorded[id] = TurnEnd(id, TurnState.FAILED, None, "error", DATABASE_AWAY)
        if self._closer is None or self._closer.done():
            self._closer = asyncio.create_task(self._close_unrecorded())

    async def _close_unrecorded(self) -> None:
        while self._unrecorded:
            await asyncio.sleep(UNRECORDED_PAUSE)
            ends = list(self._unrecorded.values())
            results = await asyncio.gather(*map(self._group_commit.submit, ends), return_exceptions=True)
            for end, result in zip(ends, results, strict=True):
                if not (isinstance(result, Exception) and is_database_outage(result)):
                    del self._unrecorded[end.turn_id]


def write_group(connection: Connection, items: Sequence[TurnStart | TurnEnd]) -> list[AttuneError | None]:
    """Write a group of starts and ends in the open transaction; return one error or None for each item, in order."""
    starts = {index: item for index, item in enumerate(items) if isinstance(item, TurnStart)}
    errors: dict[int, AttuneError] = _find_unloaded(connection, starts)
    starts = {index: start for index, start in starts.items() if index not in errors}
    admissions = episode_limits.admit_turns(connection, [start.turns for start in starts.values()])
    turns: list[NewTurn] = []
    for (index, start), admission in zip(list(starts.items()), admissions, strict=True):
        if isinstance(admission, AttuneError):
            errors[index] = admission
            del starts[index]
        elif admission is None:
            turns += start.turns
        else:
            turns += [replace(turn, episode_step=admission) for turn in start.turns]
    if turns:
        connection.execute(INSERT_TURNS, _leave_out_histories(connection, turns))
    if metadata := [row for start in starts.values() for row in start.metadata]:
        connection.execute(insert(TurnMetadata), metadata)
    for start in starts.values():
        if start.replaced_turn_ids:
            replaced = (Turn.id.in_(start.replaced_turn_ids), Turn.exclusion_reason.is_(None))
            reason = f"its client repeated the request and received {start.turns[0].completion_id} instead"
            connection.execute(update(Turn).where(*replaced).values(exclusion_reason=reason))
    if ends := [item.values() for item in items if isinstance(item, TurnEnd)]:
        connection.execute(FINISH_TURNS, ends)
    return [errors.get(index) for index in range(len(items))]


def _leave_out_histories(connection: Connection, turns: Sequence[NewTurn]) -> list[dict[str, object]]:
    """Return the rows of the turns, without the messages that their histories have."""
    new_ids = {turn.id for turn in turns}
    named = {id for turn in turns if (id := turn.history_id) is not None and id not in new_ids}
    existing = histories.lock_histories(connection, named) | new_ids
    rows = []
    for turn in turns:
        row = turn.columns()
        if turn.history_id in existing:
            row["own_messages"] = turn.own_messages[turn.num_history_messages :]
        else:
            row |= {"history_id": None, "num_history_messages": 0}
        rows.append(row)
    return rows


def _find_unloaded(connection: Connection, starts: Mapping[int, TurnStart]) -> dict[int, AttuneError]:
    """Return an error for each start whose engine no longer holds the required weights, by the start's index.

    A weight swap first marks the engine's row, then waits for the recorded turns. The shared lock on that row
    therefore guarantees that no turn runs unseen during a swap or is recorded under the wrong version.
    """
    required = {index: start.required_weights for index, start in starts.items() if start.required_weights is not None}
    if not required:
        return {}
    rows = connection.execute(
        select(Engine.name, Engine.weights, Engine.swapping_until)
        .where(Engine.name.in_({weights.engine for weights in required.values()}))
        .order_by(Engine.name)
        .with_for_update(read=True)
    )
    loaded = {(row.name, row.weights) for row in rows if row.swapping_until is None}
    return {
        index: VersionNotLoaded(f"{weights.label} was just unloaded from the engine; try again in a moment.")
        for index, weights in required.items()
        if (weights.engine, weights.weights) not in loaded
    }


def replace_nul(value: Any) -> Any:
    """Return the value with NUL characters replaced: PostgreSQL's text cannot hold them. The token ids stay exact."""
    if isinstance(value, str):
        return value.replace("\x00", "\ufffd")
    if isinstance(value, dict):
        return {key: replace_nul(item) for key, item in value.items()}
    return [replace_nul(item) for item in value] if isinstance(value, list) else value
