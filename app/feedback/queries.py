"""Feedback read back: by id, by completion, by conversation; and whether it still counts."""

from collections.abc import Sequence
from typing import Any

from sqlalchemy import ColumnElement, Select, case, func, select, union_all
from sqlalchemy.ext.asyncio import AsyncSession

from app.core.errors import NotFound
from app.feedback.kinds import NUMBERS
from app.feedback.repository import TABLE
from app.feedback.schemas import WITHDRAWAL, seen
from app.models import Feedback, FeedbackRank, Origin, Turn

Row = dict[str, Any]
# Words of different sorts stand side by side: a comment or a correction does not take a thumb back.
SORT: ColumnElement[str] = case((Feedback.kind.in_(NUMBERS), "number"), else_=Feedback.kind)


def _shown() -> Select[Any]:
    return (
        select(*TABLE.c, Turn.completion_id, Turn.choice_index)
        .outerjoin(Turn, Turn.id == Feedback.turn_id)
        .where(Feedback.kind != WITHDRAWAL)
    )


async def one(session: AsyncSession, project_id: str, feedback_id: str) -> Row:
    """Raises NotFound, also for another project's."""
    rows = await session.execute(_shown().where(Feedback.id == feedback_id, Feedback.project_id == project_id))
    row = rows.mappings().one_or_none()
    if row is None:
        raise NotFound(f"There is no feedback '{feedback_id}'.", param="feedback_id")
    return dict(row)


async def views(session: AsyncSession, project_id: str, rows: Sequence[Row]) -> list[dict[str, Any]]:
    """With `counts` and `withdrawn`, in two statements for the whole page."""
    withdrawn = await _withdrawn(session, project_id, rows)
    latest = await _latest(session, project_id, rows)
    return [
        seen(
            row,
            (row["completion_id"], row["choice_index"]) if row["turn_id"] else None,
            counts=row["seq"] in latest and row["id"] not in withdrawn,
            withdrawn=row["id"] in withdrawn,
        )
        for row in rows
    ]


async def _withdrawn(session: AsyncSession, project_id: str, rows: Sequence[Row]) -> set[str]:
    what = Feedback.request_metadata["withdraws"].as_string()
    said = select(what).where(
        Feedback.project_id == project_id,
        Feedback.target.in_({row["target"] for row in rows}),
        Feedback.kind == WITHDRAWAL,
        what.in_([row["id"] for row in rows]),
    )
    return set(await session.scalars(said))


async def _latest(session: AsyncSession, project_id: str, rows: Sequence[Row]) -> set[int]:
    last = func.max(Feedback.seq)
    said = (
        select(last)
        .where(
            Feedback.project_id == project_id,
            Feedback.target.in_({row["target"] for row in rows}),
            Feedback.kind != WITHDRAWAL,
        )
        .group_by(Feedback.target, Feedback.name, Feedback.source_kind, Feedback.source_id, SORT)
        .having(last.in_([row["seq"] for row in rows]))
    )
    return set(await session.scalars(said))


async def of_completion(
    session: AsyncSession, project_id: str, completion_id: str, choice_index: int | None
) -> Select[Any]:
    """What was said of its choices, alone or among others. Raises NotFound."""
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
    return _about(turns)


async def of_conversation(session: AsyncSession, project_id: str, conversation_id: str) -> Select[Any]:
    """What was said of it and of its turns. Raises NotFound."""
    turns = select(Turn.id).where(
        Turn.project_id == project_id, Turn.conversation_id == conversation_id, Turn.deleted_at.is_(None)
    )
    if await session.scalar(turns.limit(1)) is None:
        raise NotFound(f"There is no conversation '{conversation_id}'.", param="conversation_id")
    as_a_whole = select(Feedback.seq).where(
        Feedback.project_id == project_id, Feedback.conversation_id == conversation_id
    )
    return _about(turns, as_a_whole)


def _about(turns: Select[Any], *more: Select[Any]) -> Select[Any]:
    """Each way in by an index of its own; an OR over them would read the whole table."""
    alone = select(Feedback.seq).where(Feedback.turn_id.in_(turns))
    among = select(FeedbackRank.feedback_seq).where(FeedbackRank.turn_id.in_(turns))
    return _shown().where(Feedback.seq.in_(union_all(alone, among, *more)))


async def page(
    session: AsyncSession, project_id: str, said: Select[Any], *, after: str | None, limit: int, newest_first: bool
) -> tuple[list[dict[str, Any]], bool]:
    """A page in order of arrival, and whether there is more behind it."""
    if after is not None:
        seq = (await one(session, project_id, after))["seq"]
        said = said.where(Feedback.seq < seq if newest_first else Feedback.seq > seq)
    order = Feedback.seq.desc() if newest_first else Feedback.seq
    rows = [dict(row) for row in (await session.execute(said.order_by(order).limit(limit + 1))).mappings()]
    return await views(session, project_id, rows[:limit]), len(rows) > limit
