"""The feedback that batches learn from (`Feedback.batch_id`): it follows the samples of its rewards."""

from collections.abc import Collection, Sequence

from sqlalchemy import delete, exists, func, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from app.core.database import chunked
from app.models import Batch, BatchTurn, Feedback, Reward, Sample


async def assign_feedback(session: AsyncSession, turn_ids: Sequence[str], *, older_only: bool = False) -> None:
    """Record that the samples' batches learn from the feedback behind their rewards. Feedback in a batch stays.

    Where several samples use the same feedback, its batch is the oldest of theirs.

    Args:
        older_only: Only feedback that is older than the batch.
    """
    conditions = (Feedback.created_at <= Batch.created_at,) if older_only else ()
    for chunk in chunked(turn_ids):
        place = func.row_number().over(partition_by=Feedback.seq, order_by=(Batch.created_at, Batch.id))
        used = (
            select(Feedback.seq, Batch.id.label("batch_id"), place.label("place"))
            .join(Reward, Reward.feedback_seq == Feedback.seq)
            .join(Sample, Sample.turn_id == Reward.turn_id)
            .join(Batch, Batch.id == Sample.batch_id)
            .where(Reward.turn_id.in_(chunk), Reward.weight > 0, Sample.uses_feedback, Feedback.batch_id.is_(None))
            .where(*conditions)
            .subquery()
            .c
        )
        is_first = (Feedback.seq == used.seq, used.place == 1)
        await session.execute(update(Feedback).where(*is_first).values(batch_id=used.batch_id))


async def free_feedback(session: AsyncSession, batch_ids: Collection[str]) -> None:
    await session.execute(update(Feedback).where(Feedback.batch_id.in_(batch_ids)).values(batch_id=None))


async def free_feedback_on(session: AsyncSession, turn_ids: Collection[str], batch_ids: Collection[str]) -> None:
    """Free the feedback on these turns that no other sample of the batches uses; there are no more than a step has."""
    on_turns = select(Reward.feedback_seq).where(Reward.turn_id.in_(turn_ids), Reward.feedback_seq.is_not(None))
    is_used = exists().where(
        Reward.feedback_seq == Feedback.seq, Sample.turn_id == Reward.turn_id, Sample.batch_id.in_(batch_ids)
    )
    is_free = (Feedback.batch_id.in_(batch_ids), Feedback.seq.in_(on_turns), ~is_used.correlate(Feedback))
    await session.execute(update(Feedback).where(*is_free).values(batch_id=None))


async def leave_batch(session: AsyncSession, batch_id: str, turn_ids: Collection[str]) -> None:
    """Remove turns from the batch whose samples have left it, and the feedback behind their rewards alone."""
    still_used = (
        select(Reward.feedback_seq)
        .join(Sample, Sample.turn_id == Reward.turn_id)
        .where(Sample.batch_id == batch_id, Reward.feedback_seq.is_not(None))
    )
    for chunk in chunked(turn_ids):
        await session.execute(delete(BatchTurn).where(BatchTurn.batch_id == batch_id, BatchTurn.turn_id.in_(chunk)))
        dropped = select(Reward.feedback_seq).where(Reward.turn_id.in_(chunk), Reward.feedback_seq.is_not(None))
        await session.execute(
            update(Feedback)
            .where(Feedback.batch_id == batch_id, Feedback.seq.in_(dropped), Feedback.seq.not_in(still_used))
            .values(batch_id=None)
        )
