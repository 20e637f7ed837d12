"""Find the turns that feedback names by metadata, or by a conversation and a number."""

from collections.abc import Collection, Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy import ColumnElement, String, and_, case, column, exists, func, select
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import aliased

from app.core.rows import AnySelect
from app.feedback.schemas import Choice, ConversationTarget
from app.models import Origin, Turn, TurnMetadata, TurnState

QUERIES_PER_STATEMENT = 100  # of up to 16 pairs each: well below any database's limit on parameters
NEWEST = -1
_HAS_REPLY = (Turn.deleted_at.is_(None), Turn.state != TurnState.REFUSED)
_NEWEST_FIRST = (  # those that may be trained on before others, tasks last of all
    case((Turn.origin == Origin.TASK, 1), else_=0),
    case((Turn.exclusion_reason.is_not(None), 1), else_=0),
    Turn.created_at.desc(),
    Turn.id.desc(),
)


async def find_newest_turns(
    session: AsyncSession, project_id: str, metadata_queries: Sequence[dict[str, str]]
) -> list[Choice | None]:
    """Return, for each query, the newest turn whose metadata has all of its pairs, or None.

    Turns that may be trained on come first. Else a vote could be lost on what a front end sends later with the same
    metadata, such as the title of the chat: a task comes last of all.
    """
    matches: dict[int, Choice] = {}
    for start in range(0, len(metadata_queries), QUERIES_PER_STATEMENT):
        rows = []
        for number, pairs in enumerate(metadata_queries[start : start + QUERIES_PER_STATEMENT], start):
            # The longest value comes first: it is most likely an id and has the fewest matches.
            ordered = sorted(pairs.items(), key=lambda pair: -len(pair[1]))
            rows += [(number, position, key, value) for position, (key, value) in enumerate(ordered)]
        matches |= await _find_newest(session, project_id, rows)
    return [matches.get(number) for number in range(len(metadata_queries))]


async def _find_newest(
    session: AsyncSession, project_id: str, rows: Sequence[tuple[int, int, str, str]]
) -> dict[int, Choice]:
    """Return the newest turns by query. A row is (number of the query, position of the pair in it, key, value).

    The first pair of each query is looked up by index, and the other pairs are checked for each turn that has it.
    """
    columns: list[ColumnElement[Any]] = [column(name, sa.Integer) for name in ("number", "position")]
    columns += [column(name, String) for name in ("key", "value")]
    queries = sa.values(*columns, name="queries").data(rows).cte("queries")
    first, other = queries.alias("first"), queries.alias("other")
    has_pair = exists().where(
        TurnMetadata.turn_id == Turn.id, TurnMetadata.key == other.c.key, TurnMetadata.value == other.c.value
    )
    lacks_pair = exists().where(
        other.c.number == first.c.number, other.c.position > 0, ~has_pair.correlate(Turn, other)
    )
    pair = aliased(TurnMetadata)
    age = func.row_number().over(partition_by=first.c.number, order_by=_NEWEST_FIRST)
    is_first = and_(pair.project_id == project_id, pair.key == first.c.key, pair.value == first.c.value)
    matches = (
        select(first.c.number, Turn.completion_id, Turn.choice_index, age.label("age"))
        .join_from(first, pair, is_first)
        .join(Turn, Turn.id == pair.turn_id)
        .where(first.c.position == 0, *_HAS_REPLY, ~lacks_pair.correlate(Turn, first))
        .subquery()
    )
    newest = select(matches.c.number, matches.c.completion_id, matches.c.choice_index).where(matches.c.age == 1)
    return {
        index: Choice(completion_id=completion_id, choice_index=choice_index)
        for index, completion_id, choice_index in await session.execute(newest)
    }


async def find_traced_turns(session: AsyncSession, project_id: str, trace_ids: Collection[str]) -> dict[str, Choice]:
    """Return, by the trace of their requests (the header `traceparent`), the newest turn of each; others are left out.

    Turns that may be trained on come first, and tasks last, as with metadata.
    """
    found: dict[str, Choice] = {}
    ids = sorted(trace_ids)
    for start in range(0, len(ids), QUERIES_PER_STATEMENT):
        age = func.row_number().over(partition_by=Turn.trace_id, order_by=_NEWEST_FIRST)
        in_traces = (Turn.project_id == project_id, Turn.trace_id.in_(ids[start : start + QUERIES_PER_STATEMENT]))
        turns = select(Turn.trace_id, Turn.completion_id, Turn.choice_index, age.label("age"))
        rows = turns.where(*in_traces, *_HAS_REPLY).subquery()
        newest = select(rows.c.trace_id, rows.c.completion_id, rows.c.choice_index).where(rows.c.age == 1)
        for trace_id, completion_id, choice_index in await session.execute(newest):
            found[trace_id] = Choice(completion_id=completion_id, choice_index=choice_index)
    return found


async def find_numbered_turns(
    session: AsyncSession, project_id: str, targets: Sequence[ConversationTarget]
) -> list[Choice | None]:
    """Return, for each target, the turn with its number, or None.

    A turn's number is its depth in the tree of its conversation's turns. Of several at one depth, which are repeated or
    regenerated replies, the newest one is meant.
    """
    found: dict[tuple[str, int], str] = {}
    keys = sorted({(target.conversation_id, target.turn or 0) for target in targets})
    for start in range(0, len(keys), QUERIES_PER_STATEMENT):
        part = keys[start : start + QUERIES_PER_STATEMENT]
        if numbered := [(id, number) for id, number in part if number != NEWEST]:
            found |= await _find_by_depth(session, project_id, numbered)
        if newest := [id for id, number in part if number == NEWEST]:
            found |= await _find_newest_of(session, project_id, newest)
    ids = [found.get((target.conversation_id, target.turn or 0)) for target in targets]
    return [
        None if id is None else Choice(completion_id=id, choice_index=target.choice_index or 0)
        for id, target in zip(ids, targets, strict=True)
    ]


async def _find_by_depth(
    session: AsyncSession, project_id: str, keys: Sequence[tuple[str, int]]
) -> dict[tuple[str, int], str]:
    """Return completion ids by conversation and depth, from 1."""
    numbers = {number for _, number in keys}
    parent, child = aliased(Turn), aliased(Turn)
    has_parent = exists().where(parent.id == Turn.parent_id, parent.conversation_id == Turn.conversation_id)
    tree = (
        select(Turn.id, Turn.conversation_id, sa.literal(1).label("depth"))
        .where(*_in_conversations(project_id, {id for id, _ in keys}), ~has_parent)
        .cte("tree", recursive=True)
    )
    is_child = and_(child.parent_id == tree.c.id, child.conversation_id == tree.c.conversation_id)
    children = select(child.id, child.conversation_id, tree.c.depth + 1).join(tree, is_child)
    tree = tree.union_all(children.where(child.origin == Origin.CHAT, tree.c.depth < max(numbers)))
    key = (tree.c.conversation_id, tree.c.depth)
    turns = _select_newest(*key).join(tree, tree.c.id == Turn.id).where(tree.c.depth.in_(numbers))
    return await _read_completion_ids(session, turns)


async def _find_newest_of(
    session: AsyncSession, project_id: str, conversation_ids: Sequence[str]
) -> dict[tuple[str, int], str]:
    in_conversations = _in_conversations(project_id, conversation_ids)
    turns = _select_newest(Turn.conversation_id, sa.literal(NEWEST)).where(*in_conversations)
    return await _read_completion_ids(session, turns)


def _in_conversations(project_id: str, conversation_ids: Collection[str]) -> list[ColumnElement[bool]]:
    named = Turn.conversation_id.in_(conversation_ids)
    return [Turn.project_id == project_id, named, Turn.origin == Origin.CHAT]


def _select_newest(conversation_id: Any, number: Any) -> AnySelect:
    order = (Turn.created_at.desc(), Turn.id.desc())
    age = func.row_number().over(partition_by=(conversation_id, number), order_by=order)
    columns = (conversation_id.label("conversation_id"), number.label("number"), Turn.completion_id, age.label("age"))
    return select(*columns).where(*_HAS_REPLY)


async def _read_completion_ids(session: AsyncSession, turns: AnySelect) -> dict[tuple[str, int], str]:
    rows = turns.subquery()
    newest = select(rows.c.conversation_id, rows.c.number, rows.c.completion_id).where(rows.c.age == 1)
    return {(id, number): completion_id for id, number, completion_id in await session.execute(newest)}
