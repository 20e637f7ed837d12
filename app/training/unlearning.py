"""Turns → no more learning from them: open samples go, frozen batches break up, versions that learned are marked."""

from collections.abc import Collection, Sequence

from sqlalchemy import select, update
from sqlalchemy.ext.asyncio import AsyncSession

from app.core.database import now
from app.core.jobs import enqueue_after_commit
from app.models import (
    WITHDRAWN,
    Batch,
    BatchState,
    Policy,
    Rater,
    RaterStanding,
    Reward,
    Sample,
    SampleState,
    Turn,
    Version,
    lock_turns,
)
from app.privacy.lineage.repository import line_of

ERASED = "erased"
BROKEN_UP = "some of its samples were erased"


async def lock(session: AsyncSession, project_id: str, turn_ids: Collection[str]) -> None:
    """The policies before anything else, as assembling and committing do: no batch is frozen or trained meanwhile."""
    mine = select(Policy.id).where(Policy.project_id == project_id)
    await session.execute(mine.order_by(Policy.id).with_for_update(key_share=True))
    await lock_turns(session, turn_ids)


async def forget(session: AsyncSession, own: Collection[str], touched: Collection[str]) -> list[str]:
    """`own` turns are never learned from again; `touched` ones wait until they have been judged anew. Returns the
    batches that were broken up."""
    broken = await break_up(session, [*own, *touched])
    await drop(session, own, (SampleState.OPEN, SampleState.QUARANTINED), ERASED)
    doubted = await _doubted(session, touched)
    await drop(session, set(touched) - doubted, (SampleState.OPEN, SampleState.QUARANTINED), WITHDRAWN)
    await drop(session, doubted, (SampleState.OPEN,), WITHDRAWN)
    await session.execute(
        update(Sample)
        .where(Sample.turn_id.in_(own))
        .values(conversation_id=None, rater=None, cluster=None, group_id=None)
        .execution_options(synchronize_session=False)
    )
    enqueue_after_commit(session, "curate", "assemble")
    return broken


async def _doubted(session: AsyncSession, turn_ids: Collection[str]) -> set[str]:
    """Turns on which somebody who is held has a word: their samples go on waiting for an admin."""
    words = (
        select(Reward.turn_id)
        .join(Turn, Turn.id == Reward.turn_id)
        .join(Rater, (Rater.project_id == Turn.project_id) & (Rater.name == Reward.rater))
        .where(Reward.turn_id.in_(turn_ids), Rater.standing == RaterStanding.QUARANTINED)
    )
    return set(await session.scalars(words))


async def break_up(session: AsyncSession, turn_ids: Collection[str]) -> list[str]:
    """Batches with these turns are refused under a fresh fence, so that a trainer that holds one cannot commit; their
    samples are open again."""
    frozen = select(Sample.batch_id).where(
        Sample.turn_id.in_(turn_ids), Sample.state == SampleState.BATCHED, Sample.batch_id.is_not(None)
    )
    batch_ids = set(await session.scalars(frozen))
    refused = await session.execute(
        update(Batch)
        .where(Batch.id.in_(batch_ids), Batch.state == BatchState.OPEN)
        .values(
            state=BatchState.REFUSED,
            reason=BROKEN_UP,
            settled_at=now(),
            fence=Batch.fence + 1,
            lease_owner=None,
            lease_until=None,
        )
        .returning(Batch.id)
        .execution_options(synchronize_session=False)
    )
    broken = sorted(refused.scalars())
    await session.execute(
        update(Sample)
        .where(Sample.batch_id.in_(broken), Sample.state == SampleState.BATCHED)
        .values(state=SampleState.OPEN, batch_id=None)
        .execution_options(synchronize_session=False)
    )
    return broken


async def drop(session: AsyncSession, turn_ids: Collection[str], states: Sequence[SampleState], reason: str) -> None:
    await session.execute(
        update(Sample)
        .where(Sample.turn_id.in_(turn_ids), Sample.state.in_(states))
        .values(state=SampleState.DROPPED, reason=reason)
        .execution_options(synchronize_session=False)
    )


async def mark(session: AsyncSession, version_ids: Collection[str]) -> None:
    """These versions, and all that stand on them, have learned from what is erased now."""
    line = line_of(version_ids)
    await session.execute(
        update(Version)
        .where(Version.id.in_(select(line.c.id)), Version.tainted_at.is_(None))
        .values(tainted_at=now())
        .execution_options(synchronize_session=False)
    )
