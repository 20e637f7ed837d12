"""Feedback that nobody has looked at, by the page, and the turns that it is about."""

from dataclasses import dataclass
from typing import Any

from sqlalchemy import exists, or_, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from app.models import Feedback, FeedbackRank, Turn, TurnState, record_audit
from workers.feedback import signals
from workers.feedback.signals import Judged

TALKS = 20  # conversations on one page: each may have hundreds of turns


@dataclass(frozen=True)
class Page:
    seqs: list[int]
    turns: list[Judged]  # in the order in which they began
    last: bool  # nothing was left for another


async def page(session: AsyncSession, limit: int) -> Page:
    """The oldest first. A thumb may outrun its stream: it waits for the turn to end."""
    open_ranked = exists().where(
        FeedbackRank.feedback_seq == Feedback.seq, Turn.id == FeedbackRank.turn_id, Turn.state == TurnState.OPEN
    )
    columns = (Feedback.seq, Feedback.turn_id, Feedback.project_id, Feedback.conversation_id, Feedback.target)
    rows = await session.execute(
        select(*columns)
        .outerjoin(Turn, Turn.id == Feedback.turn_id)
        .where(~Feedback.processed, or_(Turn.id.is_(None), Turn.state != TurnState.OPEN), ~open_ranked)
        .order_by(Feedback.seq)
        .limit(limit)
    )
    fresh: list[Any] = []
    cut = False
    talks: set[tuple[str, str]] = set()
    for row in rows:
        if row.turn_id is None and row.conversation_id is not None:
            cut = len(talks) == TALKS
            if cut:
                break
            talks.add((row.project_id, row.conversation_id))
        fresh.append(row)
    turn_ids = {row.turn_id for row in fresh if row.turn_id is not None}
    turn_ids |= await signals.ranked(session, {(row.project_id, row.target) for row in fresh if row.turn_id is None})
    judged = {turn.id: turn for turn in await signals.turns(session, turn_ids)}
    judged |= {turn.id: turn for turn in await signals.conversations(session, talks)}
    in_order = sorted(judged.values(), key=lambda turn: (turn.created_at, turn.id))
    return Page([row.seq for row in fresh], in_order, last=not cut and len(fresh) < limit)


async def looked_at(session: AsyncSession, seqs: list[int]) -> None:
    await session.execute(
        update(Feedback)
        .where(Feedback.seq.in_(seqs))
        .values(processed=True)
        .execution_options(synchronize_session=False)
    )


async def set_aside(session: AsyncSession, reason: str) -> None:
    """The oldest piece, which nothing could be made of: it must not stand in the way of all others."""
    found = await page(session, 1)
    await looked_at(session, found.seqs)
    rows = await session.execute(select(Feedback.id, Feedback.project_id).where(Feedback.seq.in_(found.seqs)))
    for id, project_id in rows:
        record_audit(session, "curate", "feedback set aside", id, reason[:500], project_id=project_id)
