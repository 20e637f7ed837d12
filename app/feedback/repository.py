"""Queries on the way in: each one serves a whole group, and is built once."""

import zlib
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, cast

import orjson
import sqlalchemy as sa
from sqlalchemy import ColumnElement, Select, String, Table, Text, any_, bindparam, column, func, insert, select
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.dialects.postgresql import ARRAY, JSONB
from sqlalchemy.engine import Connection
from sqlalchemy.sql.dml import ReturningInsert

from app.models import Feedback, FeedbackRank, Origin, Turn

TABLE = cast(Table, Feedback.__table__)
RANKS = cast(Table, FeedbackRank.__table__)
TURNS = cast(Table, Turn.__table__)
LOCK = 0x66623A  # of PostgreSQL's advisory locks, those that order a project's feedback
Pair = tuple[str, str]  # a project, and something of its


class Found(NamedTuple):
    """What feedback needs to know of a turn, and no more: its tokens stay where they are."""

    id: str
    project_id: str
    completion_id: str
    choice_index: int


def turns(connection: Connection, completion_ids: Iterable[str]) -> list[Found]:
    """All choices of these completions that are still there, of whichever project. Nobody has seen a rollout."""
    rows = connection.execute(_turns(_arrays(connection)), {"completions": sorted(set(completion_ids))})
    return [Found(*row) for row in rows]


def conversations(connection: Connection, asked: set[Pair]) -> set[Pair]:
    """Those of the (project, conversation) pairs that have a turn."""
    rows = connection.execute(_conversations(_arrays(connection)), _split(asked))
    return {(project, conversation) for project, conversation in rows} & asked


def with_keys(connection: Connection, keys: set[Pair]) -> dict[Pair, dict[str, Any]]:
    """Feedback by (project, idempotency key), with the choice it is about."""
    rows = connection.execute(_with_keys(_arrays(connection)), _split(keys))
    return {(row["project_id"], row["idempotency_key"]): dict(row) for row in rows.mappings()}


def in_turn(connection: Connection, projects: Iterable[str]) -> None:
    """One writer a project at a time, until the commit: `seq` is then the order in which feedback became visible,
    groups that hold the same keys in another order cannot deadlock, and a withdrawal meets what it saw. SQLite has
    one writer anyway."""
    if _arrays(connection):
        numbers = sorted({zlib.crc32(project.encode()) - 2**31 for project in projects})
        connection.execute(select(*[func.pg_advisory_xact_lock(LOCK, number) for number in numbers]))


def add(connection: Connection, rows: list[dict[str, Any]]) -> dict[str, tuple[int, float]]:
    """The ids that were taken, with their order and time; a row whose key is there already is passed over."""
    if _arrays(connection):
        taken = connection.execute(_from_json(), {"rows": orjson.dumps(rows).decode()})
    else:
        taken = connection.execute(_passing_over(sqlite.insert(TABLE)), rows)
    return {id: (seq, created_at) for id, seq, created_at in taken}


def rank(connection: Connection, rows: Sequence[dict[str, Any]]) -> None:
    connection.execute(insert(RANKS), rows)


def _arrays(connection: Connection) -> bool:
    return connection.dialect.name == "postgresql"


def _split(pairs: set[Pair]) -> dict[str, list[str]]:
    return {"projects": sorted({project for project, _ in pairs}), "others": sorted({other for _, other in pairs})}


def _among(values: ColumnElement[Any], name: str, arrays: bool) -> ColumnElement[bool]:
    """IN; as one array where there are arrays, so that the statement is the same for any number and prepared once."""
    if arrays:
        return values == any_(bindparam(name, type_=ARRAY(String)))
    return values.in_(bindparam(name, expanding=True))


@lru_cache(maxsize=2)
def _turns(arrays: bool) -> Select[Any]:
    columns = (TURNS.c.id, TURNS.c.project_id, TURNS.c.completion_id, TURNS.c.choice_index)
    shown = (TURNS.c.deleted_at.is_(None), TURNS.c.origin == Origin.CHAT)
    return select(*columns).where(_among(TURNS.c.completion_id, "completions", arrays), *shown)


@lru_cache(maxsize=2)
def _conversations(arrays: bool) -> Select[Any]:
    asked = select(TURNS.c.project_id, TURNS.c.conversation_id).where(
        _among(TURNS.c.project_id, "projects", arrays),
        _among(TURNS.c.conversation_id, "others", arrays),
        TURNS.c.deleted_at.is_(None),
    )
    return asked.distinct()


@lru_cache(maxsize=2)
def _with_keys(arrays: bool) -> Select[Any]:
    return (
        select(*TABLE.c, TURNS.c.completion_id, TURNS.c.choice_index)
        .outerjoin_from(TABLE, TURNS, TURNS.c.id == TABLE.c.turn_id)
        .where(_among(TABLE.c.project_id, "projects", arrays), _among(TABLE.c.idempotency_key, "others", arrays))
    )


@lru_cache(maxsize=1)
def _from_json() -> ReturningInsert[Any]:
    """All rows as one parameter. A list of VALUES has seventeen for each row, and the driver and the server would
    read the ever different statement anew each time: half of what an acknowledgement costs."""
    kept = [one for one in TABLE.columns if one.name not in ("seq", "created_at")]
    document = sa.cast(bindparam("rows", type_=Text), JSONB)
    record = func.jsonb_to_recordset(document).table_valued(
        *[column(one.name, one.type) for one in kept], name="record"
    )
    typed = record.render_derived(with_types=True)
    chosen = select(*[typed.c[one.name] for one in kept])
    return _passing_over(postgresql.insert(TABLE).from_select([one.name for one in kept], chosen))


def _passing_over(statement: Any) -> ReturningInsert[Any]:
    quiet = statement.on_conflict_do_nothing(index_elements=["project_id", "idempotency_key"])
    taken: ReturningInsert[Any] = quiet.returning(TABLE.c.id, TABLE.c.seq, TABLE.c.created_at)
    return taken
