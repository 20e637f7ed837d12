"""Queries for writing feedback. Each statement serves a whole group of submissions and is built once."""

import zlib
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from functools import lru_cache
from typing import NamedTuple, cast

import orjson
import sqlalchemy as sa
from sqlalchemy import (
    ColumnElement,
    CompoundSelect,
    Integer,
    Select,
    String,
    Table,
    Text,
    any_,
    bindparam,
    column,
    func,
    select,
    union_all,
)
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.dialects.postgresql import ARRAY, JSONB
from sqlalchemy.engine import Connection
from sqlalchemy.sql.dml import ReturningInsert

from app.core.rows import AnySelect
from app.feedback.feedback_rows import FeedbackRow, to_feedback_row
from app.feedback.schemas import WITHDRAWAL
from app.models import REQUESTED, Episode, Feedback, FeedbackRank, Turn

FEEDBACK = cast(Table, Feedback.__table__)
RANKS = cast(Table, FeedbackRank.__table__)
TURNS = cast(Table, Turn.__table__)
EPISODES = cast(Table, Episode.__table__)
ADVISORY_LOCK_CLASS = 0x66623A  # class of the PostgreSQL advisory locks that serialize a project's feedback
POSITION = "position"  # of a row among those that are inserted with it
ProjectAndValue = tuple[str, str]  # project id, and a key, a conversation, an episode or a target


class FoundTurn(NamedTuple):
    id: str
    exclusion_reason: str | None


class FeedbackSource(NamedTuple):
    """A source and what it speaks about; `source_id` is "" if it has none."""

    project_id: str
    target: str
    source_kind: str
    source_id: str


FoundTurns = dict[tuple[str, str, int], FoundTurn]  # by project id, completion id and choice index


def find_turns(connection: Connection, completion_ids: AbstractSet[str]) -> FoundTurns:
    """Return all choices of these completions, of any project. Deleted turns and rollouts are left out."""
    if not completion_ids:
        return {}
    rows = connection.execute(_turns_statement(has_arrays(connection)), {"completions": sorted(completion_ids)})
    return {
        (row.project_id, row.completion_id, row.choice_index): FoundTurn(row.id, row.exclusion_reason) for row in rows
    }


def find_conversations(connection: Connection, pairs: AbstractSet[ProjectAndValue]) -> set[ProjectAndValue]:
    """Return the (project, conversation) pairs that have a turn."""
    if not pairs:
        return set()
    rows = connection.execute(_conversations_statement(has_arrays(connection)), _split_pairs(pairs))
    return {(project, conversation) for project, conversation in rows} & pairs


def find_episodes(connection: Connection, pairs: AbstractSet[ProjectAndValue]) -> set[ProjectAndValue]:
    """Return the (project, episode) pairs that exist, with turns or without."""
    if not pairs:
        return set()
    rows = connection.execute(_episodes_statement(has_arrays(connection)), _split_pairs(pairs))
    return {(project, episode) for project, episode in rows} & pairs


def find_by_keys(connection: Connection, keys: AbstractSet[ProjectAndValue]) -> dict[ProjectAndValue, FeedbackRow]:
    """Return feedback by (project, idempotency key), with the choice that it is about."""
    if not keys:
        return {}
    rows = connection.execute(_by_keys_statement(has_arrays(connection)), _split_pairs(keys))
    return {(row["project_id"], row["idempotency_key"]): to_feedback_row(row) for row in rows.mappings()}


def lock_projects(connection: Connection, projects: Iterable[str]) -> None:
    """Allow one writer for each project until the commit; SQLite has one writer anyway.

    `seq` is then the order in which feedback becomes visible, groups with the same keys in another order cannot
    deadlock, and a withdrawal sees the state that it was decided on.
    """
    if has_arrays(connection):
        lock_ids = sorted({zlib.crc32(project.encode()) - 2**31 for project in projects})
        connection.execute(select(*[func.pg_advisory_xact_lock(ADVISORY_LOCK_CLASS, lock_id) for lock_id in lock_ids]))


def count_by_source(connection: Connection, sources: AbstractSet[FeedbackSource]) -> dict[tuple[str, ...], int]:
    """Return the number of rows of these sources by (project, target, source kind, source id, browser token).

    Missing ids are "". What other sources have said about the targets is not read.
    """
    parameters = {
        "projects": sorted({source.project_id for source in sources}),
        "targets": sorted({source.target for source in sources}),
        "source_kinds": sorted({source.source_kind for source in sources}),
        "source_ids": sorted({source.source_id for source in sources if source.source_id}),
    }
    rows = connection.execute(_count_by_source_statement(has_arrays(connection)), parameters)
    return {tuple(key): count for *key, count in rows if FeedbackSource(*key[:4]) in sources}


def count_by_target(connection: Connection, targets: AbstractSet[ProjectAndValue]) -> dict[ProjectAndValue, int]:
    """Return the number of rows of all sources, withdrawals included, by (project, target)."""
    rows = connection.execute(_count_by_target_statement(has_arrays(connection)), _split_pairs(targets))
    return {(project, target): count for project, target, count in rows}


def insert_feedback(connection: Connection, rows: Sequence[Mapping[str, object]]) -> dict[str, tuple[int, float]]:
    """Insert the rows in their order; return seq and creation time by id. A row whose key exists already is skipped."""
    if has_arrays(connection):
        numbered = [{**row, POSITION: position} for position, row in enumerate(rows)]
        inserted = connection.execute(_insert_from_json(), {"rows": orjson.dumps(numbered).decode()})
    else:
        inserted = connection.execute(_ignore_conflicts(sqlite.insert(FEEDBACK)), rows)
    return {id: (seq, created_at) for id, seq, created_at in inserted}


def insert_ranks(connection: Connection, rows: Sequence[dict[str, object]]) -> None:
    connection.execute(sa.insert(RANKS), rows)


def has_arrays(connection: Connection) -> bool:
    """Return whether the database takes arrays as parameters, which `is_in` needs to know."""
    return connection.dialect.name == "postgresql"


def _split_pairs(pairs: AbstractSet[ProjectAndValue]) -> dict[str, list[str]]:
    return {"projects": sorted({project for project, _ in pairs}), "others": sorted({other for _, other in pairs})}


def is_in(values: ColumnElement[str], name: str, arrays: bool) -> ColumnElement[bool]:
    """Return `values IN name`. With arrays the statement does not depend on their number and is prepared once."""
    if arrays:
        return values == any_(bindparam(name, type_=ARRAY(values.type)))
    return values.in_(bindparam(name, expanding=True))


@lru_cache(maxsize=2)
def _turns_statement(arrays: bool) -> Select[str, str, str, int, str | None]:
    columns = (TURNS.c.id, TURNS.c.project_id, TURNS.c.completion_id, TURNS.c.choice_index, TURNS.c.exclusion_reason)
    shown = (TURNS.c.deleted_at.is_(None), TURNS.c.origin.in_(REQUESTED))
    return select(*columns).where(is_in(TURNS.c.completion_id, "completions", arrays), *shown)


@lru_cache(maxsize=2)
def _conversations_statement(arrays: bool) -> Select[str, str]:
    statement = select(TURNS.c.project_id, TURNS.c.conversation_id).where(
        is_in(TURNS.c.project_id, "projects", arrays),
        is_in(TURNS.c.conversation_id, "others", arrays),
        TURNS.c.deleted_at.is_(None),
    )
    return statement.distinct()


@lru_cache(maxsize=2)
def _episodes_statement(arrays: bool) -> Select[str, str]:
    statement = select(EPISODES.c.project_id, EPISODES.c.id)
    return statement.where(is_in(EPISODES.c.id, "others", arrays), is_in(EPISODES.c.project_id, "projects", arrays))


@lru_cache(maxsize=2)
def _by_keys_statement(arrays: bool) -> AnySelect:
    return (
        select(*FEEDBACK.c, TURNS.c.completion_id, TURNS.c.choice_index)
        .outerjoin_from(FEEDBACK, TURNS, TURNS.c.id == FEEDBACK.c.turn_id)
        .where(is_in(FEEDBACK.c.project_id, "projects", arrays), is_in(FEEDBACK.c.idempotency_key, "others", arrays))
    )


@lru_cache(maxsize=2)
def _count_by_source_statement(arrays: bool) -> CompoundSelect[str, str, str, str, str, int]:
    """Two parts, because with OR the index of targets and sources would be read for all sources of a target."""
    key = (FEEDBACK.c.project_id, FEEDBACK.c.target, FEEDBACK.c.source_kind)
    token_id = func.coalesce(FEEDBACK.c.token_id, "")
    is_of_sources = (
        is_in(FEEDBACK.c.project_id, "projects", arrays),
        is_in(FEEDBACK.c.target, "targets", arrays),
        is_in(FEEDBACK.c.source_kind, "source_kinds", arrays),
        FEEDBACK.c.kind != WITHDRAWAL,
    )
    named = select(*key, FEEDBACK.c.source_id, token_id, func.count()).where(
        *is_of_sources, is_in(FEEDBACK.c.source_id, "source_ids", arrays)
    )
    nameless = select(*key, sa.literal("", String), token_id, func.count()).where(
        *is_of_sources, FEEDBACK.c.source_id.is_(None)
    )
    return union_all(named.group_by(*key, FEEDBACK.c.source_id, token_id), nameless.group_by(*key, token_id))


@lru_cache(maxsize=2)
def _count_by_target_statement(arrays: bool) -> Select[str, str, int]:
    key = (FEEDBACK.c.project_id, FEEDBACK.c.target)
    is_about = (is_in(FEEDBACK.c.project_id, "projects", arrays), is_in(FEEDBACK.c.target, "others", arrays))
    return select(*key, func.count()).where(*is_about).group_by(*key)


@lru_cache(maxsize=1)
def _insert_from_json() -> ReturningInsert[str, int, float]:
    """Return the insert of all rows from one JSON parameter.

    A list of VALUES has seventeen parameters for each row, and driver and server would parse a different statement for
    each number of rows: half of the time of an acknowledgement.
    """
    columns = [item for item in FEEDBACK.columns if item.name not in ("seq", "created_at")]
    document = sa.cast(bindparam("rows", type_=Text), JSONB)
    record = func.jsonb_to_recordset(document).table_valued(
        *[column(item.name, item.type) for item in columns], column(POSITION, Integer), name="record"
    )
    typed = record.render_derived(with_types=True)
    other = FEEDBACK.alias("other")
    same_key = (other.c.project_id == typed.c.project_id, other.c.idempotency_key == typed.c.idempotency_key)
    # A row that meets a conflict has used up a number by then; one that is left out here has not.
    is_new = ~select(other.c.seq).where(*same_key).exists()
    # Without ORDER BY a merge join would insert the rows in the order of their keys, and `seq` says whose vote counts.
    rows = select(*[typed.c[item.name] for item in columns]).where(is_new).order_by(typed.c[POSITION])
    return _ignore_conflicts(postgresql.insert(FEEDBACK).from_select([item.name for item in columns], rows))


def _ignore_conflicts(statement: postgresql.Insert | sqlite.Insert) -> ReturningInsert[str, int, float]:
    statement = statement.on_conflict_do_nothing(index_elements=["project_id", "idempotency_key"])
    return statement.returning(FEEDBACK.c.id, FEEDBACK.c.seq, FEEDBACK.c.created_at)
