"""Feedback that has not been processed yet, page by page, and the turns that it is about."""

from dataclasses import dataclass
from typing import Any

from sqlalchemy import exists, or_, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from app.models import AuditAction, Feedback, FeedbackRank, Turn, TurnState, record_audit
from workers.feedback import signals
from workers.feedback.signals import FinishedTurn

MAX_PAGE_CONVERSATIONS = 20  # each may have hundreds of turns


@dataclass(frozen=True)
class FeedbackPage:
    """Unprocessed feedback by sequence number, and its turns in order of creation. `is_last`: nothing else waits."""

    seqs: list[int]
    turns: list[FinishedTurn]
    is_last: bool


async def read_page(session: AsyncSession, limit: int) -> FeedbackPage:
    """Return the oldest unprocessed feedback. Feedback about a reply that still streams waits for its end."""
    has_open_turn = exists().where(
        FeedbackRank.feedback_seq == Feedback.seq, Turn.id == FeedbackRank.turn_id, Turn.state == TurnState.OPEN
    )
    columns = (Feedback.seq, Feedback.turn_id, Feedback.project_id, Feedback.conversation_id, Feedback.target)
    rows = await session.execute(
        select(*columns)
        .outerjoin(Turn, Turn.id == Feedback.turn_id)
        .where(~Feedback.processed, or_(Turn.id.is_(None), Turn.state != TurnState.OPEN), ~has_open_turn)
        .order_by(Feedback.seq)
        .limit(limit)
    )
    page_rows: list[Any] = []
    is_cut = False
    conversations: set[tuple[str, str]] = set()
    for row in rows:
        if row.turn_id is None and row.conversation_id is not None:
            is_cut = len(conversations) == MAX_PAGE_CONVERSATIONS
            if is_cut:
                break
            conversations.add((row.project_id, row.conversation_id))
        page_rows.append(row)
    targets = {(row.project_id, row.target) for row in page_rows if row.turn_id is None}
    turn_ids = {row.turn_id for row in page_rows if row.turn_id is not None}
    turn_ids |= await signals.read_ranked_turn_ids(session, targets)
    turns = {turn.id: turn for turn in await signals.read_finished_turns(session, turn_ids)}
    turns |= {turn.id: turn for turn in await signals.read_conversations(session, conversations)}
    in_order = sorted(turns.values(), key=lambda turn: (turn.created_at, turn.id))
    return FeedbackPage([row.seq for row in page_rows], in_order, is_last=not is_cut and len(page_rows) < limit)


async def mark_processed(session: AsyncSession, seqs: list[int]) -> None:
    await session.execute(
        update(Feedback)
        .where(Feedback.seq.in_(seqs))
        .values(processed=True)
        .execution_options(synchronize_session=False)
    )


async def skip_oldest(session: AsyncSession, reason: str) -> None:
    """Mark the oldest feedback as processed and record why: it failed, and must not block the rest."""
    page = await read_page(session, 1)
    await mark_processed(session, page.seqs)
    rows = await session.execute(select(Feedback.id, Feedback.project_id).where(Feedback.seq.in_(page.seqs)))
    for id, project_id in rows:
        record_audit(session, "curate", AuditAction.FEEDBACK_SKIPPED, id, reason[:500], project_id=project_id)
