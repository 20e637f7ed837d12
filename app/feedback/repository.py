"""Queries for writing feedback. Each statement serves a whole group of submissions and is built once."""

import zlib
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, cast

import orjson
import sqlalchemy as sa
from sqlalchemy import (
    ColumnElement,
    Integer,
    Select,
    String,
    Table,
    Text,
    and_,
    any_,
    bindparam,
    column,
    exists,
    func,
    insert,
    select,
    values,
)
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.dialects.postgresql import ARRAY, JSONB
from sqlalchemy.engine import Connection
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import aliased
from sqlalchemy.sql.dml import ReturningInsert

from app.feedback.schemas import Choice
from app.models import Feedback, FeedbackRank, Origin, Turn, TurnMetadata

FEEDBACK = cast(Table, Feedback.__table__)
RANKS = cast(Table, FeedbackRank.__table__)
TURNS = cast(Table, Turn.__table__)
ADVISORY_LOCK_CLASS = 0x66623A  # class of the PostgreSQL advisory locks that serialize a project's feedback
ProjectAndValue = tuple[str, str]  # project id, and a key or a conversation id
MetadataQuery = dict[str, str]
QueryRow = tuple[int, int, str, str]  # index of the query, position of the pair in it, key, value
QUERIES_PER_STATEMENT = 100  # of up to 16 pairs each: well below any database's limit on parameters


class TargetTurn(NamedTuple):
    """The columns of a turn that feedback needs."""

    id: str
    project_id: str
    completion_id: str
    choice_index: int


def find_turns(connection: Connection, completion_ids: Iterable[str]) -> list[TargetTurn]:
    """Return all choices of these completions, of any project. Deleted turns and rollouts are left out."""
    rows = connection.execute(_turns_statement(_has_arrays(connection)), {"completions": sorted(set(completion_ids))})
    return [TargetTurn(*row) for row in rows]


def find_conversations(connection: Connection, pairs: set[ProjectAndValue]) -> set[ProjectAndValue]:
    """Return the (project, conversation) pairs that have a turn."""
    rows = connection.execute(_conversations_statement(_has_arrays(connection)), _split_pairs(pairs))
    return {(project, conversation) for project, conversation in rows} & pairs


def find_by_keys(connection: Connection, keys: set[ProjectAndValue]) -> dict[ProjectAndValue, dict[str, Any]]:
    """Return feedback by (project, idempotency key), with the choice that it is about."""
    rows = connection.execute(_by_keys_statement(_has_arrays(connection)), _split_pairs(keys))
    return {(row["project_id"], row["idempotency_key"]): dict(row) for row in rows.mappings()}


def lock_projects(connection: Connection, projects: Iterable[str]) -> None:
    """Allow one writer for each project until the commit; SQLite has one writer anyway.

    `seq` is then the order in which feedback becomes visible, groups with the same keys in another order cannot
    deadlock, and a withdrawal sees the state that it was decided on.
    """
    if _has_arrays(connection):
        lock_ids = sorted({zlib.crc32(project.encode()) - 2**31 for project in projects})
        connection.execute(select(*[func.pg_advisory_xact_lock(ADVISORY_LOCK_CLASS, lock_id) for lock_id in lock_ids]))


def insert_feedback(connection: Connection, rows: list[dict[str, Any]]) -> dict[str, tuple[int, float]]:
    """Insert the rows; return seq and creation time by id. A row whose key exists already is skipped."""
    if _has_arrays(connection):
        inserted = connection.execute(_insert_from_json(), {"rows": orjson.dumps(rows).decode()})
    else:
        inserted = connection.execute(_ignore_conflicts(sqlite.insert(FEEDBACK)), rows)
    return {id: (seq, created_at) for id, seq, created_at in inserted}


def insert_ranks(connection: Connection, rows: Sequence[dict[str, Any]]) -> None:
    connection.execute(insert(RANKS), rows)


def _has_arrays(connection: Connection) -> bool:
    return connection.dialect.name == "postgresql"


def _split_pairs(pairs: set[ProjectAndValue]) -> dict[str, list[str]]:
    return {"projects": sorted({project for project, _ in pairs}), "others": sorted({other for _, other in pairs})}


def _is_in(values: ColumnElement[Any], name: str, arrays: bool) -> ColumnElement[bool]:
    """Return `values IN name`. With arrays the statement does not depend on their number and is prepared once."""
    if arrays:
        return values == any_(bindparam(name, type_=ARRAY(String)))
    return values.in_(bindparam(name, expanding=True))


@lru_cache(maxsize=2)
def _turns_statement(arrays: bool) -> Select[Any]:
    columns = (TURNS.c.id, TURNS.c.project_id, TURNS.c.completion_id, TURNS.c.choice_index)
    shown = (TURNS.c.deleted_at.is_(None), TURNS.c.origin == Origin.CHAT)
    return select(*columns).where(_is_in(TURNS.c.completion_id, "completions", arrays), *shown)


@lru_cache(maxsize=2)
def _conversations_statement(arrays: bool) -> Select[Any]:
    statement = select(TURNS.c.project_id, TURNS.c.conversation_id).where(
        _is_in(TURNS.c.project_id, "projects", arrays),
        _is_in(TURNS.c.conversation_id, "others", arrays),
        TURNS.c.deleted_at.is_(None),
    )
    return statement.distinct()


@lru_cache(maxsize=2)
def _by_keys_statement(arrays: bool) -> Select[Any]:
    return (
        select(*FEEDBACK.c, TURNS.c.completion_id, TURNS.c.choice_index)
        .outerjoin_from(FEEDBACK, TURNS, TURNS.c.id == FEEDBACK.c.turn_id)
        .where(_is_in(FEEDBACK.c.project_id, "projects", arrays), _is_in(FEEDBACK.c.idempotency_key, "others", arrays))
    )


@lru_cache(maxsize=1)
def _insert_from_json() -> ReturningInsert[Any]:
    """Return the insert of all rows from one JSON parameter.

    A list of VALUES has seventeen parameters for each row, and driver and server would parse a different statement for
    each number of rows: half of the time of an acknowledgement.
    """
    columns = [item for item in FEEDBACK.columns if item.name not in ("seq", "created_at")]
    document = sa.cast(bindparam("rows", type_=Text), JSONB)
    record = func.jsonb_to_recordset(document).table_valued(
        *[column(item.name, item.type) for item in columns], name="record"
    )
    typed = record.render_derived(with_types=True)
    rows = select(*[typed.c[item.name] for item in columns])
    return _ignore_conflicts(postgresql.insert(FEEDBACK).from_select([item.name for item in columns], rows))


def _ignore_conflicts(statement: Any) -> ReturningInsert[Any]:
    statement = statement.on_conflict_do_nothing(index_elements=["project_id", "idempotency_key"])
    returning: ReturningInsert[Any] = statement.returning(FEEDBACK.c.id, FEEDBACK.c.seq, FEEDBACK.c.created_at)
    return returning


async def find_newest_turns(
    session: AsyncSession, project_id: str, metadata_queries: Sequence[MetadataQuery]
) -> list[Choice | None]:
    """Return, for each query, the newest turn whose metadata has all of its pairs, or None.

    This runs before the write transaction, so that a broad query delays no other writer.
    """
    matches: dict[int, Choice] = {}
    for start in range(0, len(metadata_queries), QUERIES_PER_STATEMENT):
        chunk = enumerate(metadata_queries[start : start + QUERIES_PER_STATEMENT], start)
        rows = [row for index, pairs in chunk for row in _query_rows(index, pairs)]
        matches |= await _find_newest(session, project_id, rows)
    return [matches.get(index) for index in range(len(metadata_queries))]


def _query_rows(index: int, pairs: MetadataQuery) -> list[QueryRow]:
    """Return one row for each pair, the longest value first: it is most likely an id and has the fewest matches."""
    ordered = sorted(pairs.items(), key=lambda pair: -len(pair[1]))
    return [(index, position, key, value) for position, (key, value) in enumerate(ordered)]


async def _find_newest(session: AsyncSession, project_id: str, rows: list[QueryRow]) -> dict[int, Choice]:
    """Look up the first pair of each query by index and check the other pairs for each turn that has it."""
    columns = (column("number", Integer), column("position", Integer), column("key", String), column("value", String))
    queries = values(*columns, name="queries").data(rows).cte("queries")
    first, other = queries.alias("first"), queries.alias("other")
    has_pair = exists().where(
        TurnMetadata.turn_id == Turn.id, TurnMetadata.key == other.c.key, TurnMetadata.value == other.c.value
    )
    lacks_pair = exists().where(
        other.c.number == first.c.number, other.c.position > 0, ~has_pair.correlate(Turn, other)
    )
    pair = aliased(TurnMetadata)
    age = func.row_number().over(partition_by=first.c.number, order_by=(Turn.created_at.desc(), Turn.id.desc()))
    matches = (
        select(first.c.number, Turn.completion_id, Turn.choice_index, age.label("age"))
        .join_from(
            first,
            pair,
            and_(pair.project_id == project_id, pair.key == first.c.key, pair.value == first.c.value),
        )
        .join(Turn, Turn.id == pair.turn_id)
        .where(first.c.position == 0, Turn.deleted_at.is_(None), ~lacks_pair.correlate(Turn, first))
        .subquery()
    )
    newest = select(matches.c.number, matches.c.completion_id, matches.c.choice_index).where(matches.c.age == 1)
    return {
        index: Choice(completion_id=completion_id, choice_index=choice_index)
        for index, completion_id, choice_index in await session.execute(newest)
    }
