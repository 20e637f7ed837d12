"""Read feedback by id, by completion or by conversation, and whether it is still effective."""

from collections.abc import Sequence
from typing import Any

from sqlalchemy import ColumnElement, Select, case, func, select, union_all
from sqlalchemy.ext.asyncio import AsyncSession

from app.core.errors import NotFound
from app.core.pagination import apply_keyset
from app.feedback.repository import FEEDBACK
from app.feedback.schemas import WITHDRAWAL, feedback_view
from app.models import NUMERIC_KINDS, Feedback, FeedbackRank, Origin, Turn

Row = dict[str, Any]
# Feedback replaces earlier feedback of the same class only: a comment does not replace a rating.
KIND_CLASS: ColumnElement[str] = case((Feedback.kind.in_(NUMERIC_KINDS), "number"), else_=Feedback.kind)


def _select_feedback() -> Select[Any]:
    return (
        select(*FEEDBACK.c, Turn.completion_id, Turn.choice_index)
        .outerjoin(Turn, Turn.id == Feedback.turn_id)
        .where(Feedback.kind != WITHDRAWAL)
    )


async def get_feedback(session: AsyncSession, project_id: str, feedback_id: str) -> Row:
    """Return one row. Raises NotFound, also for feedback of another project."""
    rows = await session.execute(
        _select_feedback().where(Feedback.id == feedback_id, Feedback.project_id == project_id)
    )
    row = rows.mappings().one_or_none()
    if row is None:
        raise NotFound(f"There is no feedback '{feedback_id}'.", param="feedback_id")
    return dict(row)


async def to_views(session: AsyncSession, project_id: str, rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return the views of the rows, with `effective` and `withdrawn`, which take two statements for all rows."""
    withdrawn = await _withdrawn_ids(session, project_id, rows)
    latest = await _latest_seqs(session, project_id, rows)
    return [
        feedback_view(
            row,
            (row["completion_id"], row["choice_index"]) if row["turn_id"] else None,
            effective=row["seq"] in latest and row["id"] not in withdrawn,
            withdrawn=row["id"] in withdrawn,
        )
        for row in rows
    ]


async def _withdrawn_ids(session: AsyncSession, project_id: str, rows: Sequence[Row]) -> set[str]:
    withdrawn_id = Feedback.request_metadata["withdraws"].as_string()
    query = select(withdrawn_id).where(
        Feedback.project_id == project_id,
        Feedback.target.in_({row["target"] for row in rows}),
        Feedback.kind == WITHDRAWAL,
        withdrawn_id.in_([row["id"] for row in rows]),
    )
    return set(await session.scalars(query))


async def _latest_seqs(session: AsyncSession, project_id: str, rows: Sequence[Row]) -> set[int]:
    last_seq = func.max(Feedback.seq)
    query = (
        select(last_seq)
        .where(
            Feedback.project_id == project_id,
            Feedback.target.in_({row["target"] for row in rows}),
            Feedback.kind != WITHDRAWAL,
        )
        .group_by(Feedback.target, Feedback.name, Feedback.source_kind, Feedback.source_id, KIND_CLASS)
        .having(last_seq.in_([row["seq"] for row in rows]))
    )
    return set(await session.scalars(query))


async def select_by_completion(
    session: AsyncSession, project_id: str, completion_id: str, choice_index: int | None
) -> Select[Any]:
    """Return the query of all feedback about a completion's choices, comparisons and rankings included.

    Raises NotFound.
    """
    turns = select(Turn.id).where(
        Turn.project_id == project_id,
        Turn.completion_id == completion_id,
        Turn.deleted_at.is_(None),
        Turn.origin == Origin.CHAT,
    )
    if choice_index is not None:
        turns = turns.where(Turn.choice_index == choice_index)
    if await session.scalar(turns.limit(1)) is None:
        raise NotFound(f"There is no completion '{completion_id}'.", param="completion_id")
    return _select_by_turns(turns)


async def select_by_conversation(session: AsyncSession, project_id: str, conversation_id: str) -> Select[Any]:
    """Return the query of all feedback about a conversation and its turns. Raises NotFound."""
    turns = select(Turn.id).where(
        Turn.project_id == project_id, Turn.conversation_id == conversation_id, Turn.deleted_at.is_(None)
    )
    if await session.scalar(turns.limit(1)) is None:
        raise NotFound(f"There is no conversation '{conversation_id}'.", param="conversation_id")
    about_conversation = select(Feedback.seq).where(
        Feedback.project_id == project_id, Feedback.conversation_id == conversation_id
    )
    return _select_by_turns(turns, about_conversation)


def _select_by_turns(turns: Select[Any], *more: Select[Any]) -> Select[Any]:
    """Return the query of feedback about these turns and of the `more` queries of `seq`.

    A union lets each part use its own index; an OR would read the whole table.
    """
    about_turn = select(Feedback.seq).where(Feedback.turn_id.in_(turns))
    in_ranking = select(FeedbackRank.feedback_seq).where(FeedbackRank.turn_id.in_(turns))
    return _select_feedback().where(Feedback.seq.in_(union_all(about_turn, in_ranking, *more)))


async def list_page(
    session: AsyncSession, project_id: str, query: Select[Any], *, after: str | None, limit: int, newest_first: bool
) -> tuple[list[dict[str, Any]], bool]:
    """Return a page of views in order of arrival, and whether there are more. Raises NotFound."""
    last = None if after is None else ((await get_feedback(session, project_id, after))["seq"],)
    query = apply_keyset(query, (Feedback.seq,), last, limit, descending=newest_first)
    rows = [dict(row) for row in (await session.execute(query)).mappings()]
    return await to_views(session, project_id, rows[:limit]), len(rows) > limit
