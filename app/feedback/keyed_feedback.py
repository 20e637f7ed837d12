"""Feedback by a key of its sender: the same key with new content replaces what was said before.

A front end knows its own id of a vote and repeats it with each change (Open WebUI, Langfuse); deleting it names the id
alone. The rows stay append-only: new content is a new row, and the one before is withdrawn unless the new one replaces
it anyway. With `sent_at`, changes that arrive in another order than they were made in end in the same state.
The project's lock, which every writer of its feedback takes, makes the state of a key exact.
"""

import hashlib
import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import cast

import sqlalchemy as sa
from sqlalchemy import Select, Table, select
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.engine import Connection

from app.core.errors import Conflict
from app.feedback import repository
from app.feedback.effective import is_withdrawn
from app.feedback.feedback_rows import FeedbackRow, to_feedback_row
from app.feedback.repository import FEEDBACK, ProjectAndValue, has_arrays, is_in
from app.feedback.schemas import WITHDRAWAL
from app.models import NUMERIC_KINDS, VOTE_KINDS, Feedback, FeedbackKey, new_id

KEYS = cast(Table, FeedbackKey.__table__)
SUPERSEDED = "Feedback with this key and a later 'sent_at' was recorded before; nothing was changed."


@dataclass(slots=True)
class KeyState:
    """The newest feedback of a key. `feedback` is None where there is none: it was deleted, or never came."""

    sent_at: float | None
    revision: int
    feedback: FeedbackRow | None
    is_withdrawn: bool


def withdrawal_of(row: FeedbackRow, *, idempotency_key: str) -> dict[str, object]:
    """Return the columns of a row that withdraws this feedback."""
    return {
        "id": new_id("fb"),
        "kind": WITHDRAWAL,
        "withdraws": row["id"],
        "request_metadata": {"withdraws": row["id"]},  # which older releases read
        "idempotency_key": idempotency_key,
        "fingerprint": hashlib.sha256(row["id"].encode()).hexdigest(),
        "processed": row["kind"] not in VOTE_KINDS,
        "project_id": row["project_id"],
        "turn_id": row["turn_id"],
        "conversation_id": row["conversation_id"],
        "episode_id": row["episode_id"],
        "target": row["target"],
        "name": row["name"],
        "source_kind": row["source_kind"],
        "source_id": row["source_id"],
    }


class KeyedFeedback:
    """The keys of one transaction, with what its items change about them."""

    def __init__(self, connection: Connection, keys: Collection[ProjectAndValue]) -> None:
        self._connection = connection
        self._states = read_states(connection, keys)
        self._accepted: dict[ProjectAndValue, list[FeedbackRow]] = {}  # the rows of each key, in order

    def choose_idempotency_key(self, key: ProjectAndValue, fingerprint: str, sent_at: float | None) -> str:
        """Return the idempotency key of this content: that of the row that has it already, or a new one.

        Raises Conflict if a later change of the key is known.
        """
        state = self._states.setdefault(key, KeyState(None, 0, None, is_withdrawn=False))
        raise_if_superseded(state, sent_at)
        if state.feedback is not None and state.feedback["fingerprint"] == fingerprint and not state.is_withdrawn:
            return str(state.feedback["idempotency_key"])
        return f"key:{hashlib.sha256(key[1].encode()).hexdigest()}:{state.revision + 1}"

    def accept(self, key: ProjectAndValue, row: FeedbackRow, sent_at: float | None) -> None:
        """Make `row`, which may be one that the key has, the feedback of the key."""
        state = self._states[key]
        rows = self._accepted.setdefault(key, [])
        if sent_at is not None:
            state.sent_at = max(not_later_than_now(sent_at), state.sent_at or 0.0)
        if state.feedback is None or state.feedback["idempotency_key"] != row["idempotency_key"]:
            if state.feedback is not None and not state.is_withdrawn and not rows:
                rows.append(state.feedback)
            rows.append(row)
            state.feedback, state.revision, state.is_withdrawn = row, state.revision + 1, False

    def write(self, created_ids: Collection[str]) -> None:
        """Record the keys, and withdraw what their new feedback does not replace by its target and its source.

        Args:
            created_ids: The ids of the new feedback that was inserted; a limit may have refused others.
        """
        withdrawals: list[dict[str, object]] = []
        for key, accepted in self._accepted.items():
            rows = [row for row in accepted if "seq" in row or row["id"] in created_ids]
            if accepted:
                self._states[key].feedback = rows[-1] if rows else None
            withdrawals += [
                withdrawal_of(row, idempotency_key=new_id("auto"))
                for row in rows[:-1]
                if _identity(row) != _identity(rows[-1])
            ]
        write_states(self._connection, {key: self._states[key] for key in sorted(self._accepted)})
        if withdrawals:
            repository.insert_feedback(self._connection, withdrawals)


def raise_if_superseded(state: KeyState, sent_at: float | None) -> None:
    """Raise Conflict if the key has changed later than `sent_at`."""
    if sent_at is not None and state.sent_at is not None and not_later_than_now(sent_at) < state.sent_at:
        raise Conflict(SUPERSEDED, code="superseded", param="sent_at")


def read_states(connection: Connection, keys: Collection[ProjectAndValue]) -> dict[ProjectAndValue, KeyState]:
    """Return the states of those keys that exist. It takes the locks of their projects."""
    if not keys:
        return {}
    repository.lock_projects(connection, {project_id for project_id, _ in keys})
    parameters = {"projects": sorted({project for project, _ in keys}), "others": sorted({key for _, key in keys})}
    states: dict[ProjectAndValue, KeyState] = {}
    for row in connection.execute(_states_statement(has_arrays(connection)), parameters).mappings():
        feedback = None if row["id"] is None else to_feedback_row(row)
        state = KeyState(row["key_sent_at"], row["key_revision"], feedback, bool(row["is_withdrawn"]))
        states[row["key_project_id"], row["key"]] = state
    return {key: state for key, state in states.items() if key in keys}


def write_states(connection: Connection, states: Mapping[ProjectAndValue, KeyState]) -> None:
    """Write the states of keys, new ones included."""
    rows = [
        {
            "project_id": project_id,
            "key": key,
            "feedback_id": None if state.feedback is None else state.feedback["id"],
            "sent_at": state.sent_at,
            "revision": state.revision,
        }
        for (project_id, key), state in states.items()
    ]
    if not rows:
        return
    insert = postgresql.insert(KEYS) if has_arrays(connection) else sqlite.insert(KEYS)
    changed = {name: insert.excluded[name] for name in ("feedback_id", "sent_at", "revision")}
    connection.execute(insert.on_conflict_do_update(index_elements=["project_id", "key"], set_=changed), rows)


def not_later_than_now(sent_at: float) -> float:
    """A clock that is ahead must not make all later changes look old."""
    return min(sent_at, time.time())


def delete_keys(feedback_ids: Iterable[str]) -> sa.Delete:
    """Return the statement that forgets the keys of this feedback."""
    return sa.delete(FeedbackKey).where(FeedbackKey.feedback_id.in_(list(feedback_ids)))


def _identity(row: FeedbackRow) -> tuple[object, ...]:
    """Return what feedback must have in common for the later to replace the earlier; see `is_replaced`."""
    kind = "number" if row["kind"] in NUMERIC_KINDS else row["kind"]
    return row["target"], row["name"], row["source_kind"], row["source_id"], kind


@lru_cache(maxsize=2)
def _states_statement(arrays: bool) -> Select[object]:
    key = (
        KEYS.c.project_id.label("key_project_id"),
        KEYS.c.key,
        KEYS.c.sent_at.label("key_sent_at"),
        KEYS.c.revision.label("key_revision"),
    )
    of_feedback = sa.and_(Feedback.project_id == KEYS.c.project_id, Feedback.id == KEYS.c.feedback_id)
    return (
        select(*key, *FEEDBACK.c, is_withdrawn().label("is_withdrawn"))
        .select_from(KEYS)
        .outerjoin(FEEDBACK, of_feedback)
        .where(is_in(KEYS.c.project_id, "projects", arrays), is_in(KEYS.c.key, "others", arrays))
    )
