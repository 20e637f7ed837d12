"""Replies → Turns: each rollout is settled once, under its fence, with turn, reward and samples."""

from sqlalchemy import func, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from alignment.config.rewards import VERIFIER
from app.chat.turn_writer import CLOSE, TurnEnd
from app.core import leases
from app.core.database import now
from app.core.jobs import enqueue_after_commit
from app.core.settings import Settings
from app.models import Rollout, RolloutState, Turn, TurnState
from workers.feedback import curate, group_samples
from workers.queue.retry import pause, plain

NOT_ASKED = "not_asked"  # the finish reason of a turn that was to be
DELETED = "the turn is deleted"


async def done(
    session: AsyncSession,
    settings: Settings,
    id: str,
    fence: int,
    ending: TurnEnd,
    *,
    engine: str,
    tokens: int,
    seconds: float,
    reward: float | None,
    reason: str | None,
) -> None:
    """Raises LeaseLost."""
    await group_samples.lock(session, [id])
    gone = await session.scalar(select(Turn.deleted_at).where(Turn.id == id))
    told = {"tokens": tokens, "duration_seconds": seconds, "settled_at": now()}
    if gone is not None:
        await leases.finish(session, Rollout, id, fence=fence, state=RolloutState.SKIPPED, reason=DELETED, **told)
        return
    reason = None if reason is None else plain(reason)
    await leases.finish(
        session, Rollout, id, fence=fence, state=RolloutState.DONE, reward=reward, reason=reason, **told
    )
    spoken = update(Turn).where(Turn.id == id).values(engine=engine)
    await session.execute(spoken.execution_options(synchronize_session=False))
    await (await session.connection()).execute(CLOSE, [ending.values()])
    if reward is not None:
        await curate.note(session, id, VERIFIER, reward)
    await curate.reconsider(session, {id}, settings)
    enqueue_after_commit(session, "curate", "assemble", "rollout")


async def closed(
    session: AsyncSession, settings: Settings, id: str, fence: int, state: RolloutState, reason: str
) -> None:
    """Skipped or failed: its group samples need not wait for it any longer. Raises LeaseLost."""
    await group_samples.lock(session, [id])
    reason = plain(reason)
    await leases.finish(session, Rollout, id, fence=fence, state=state, reason=reason, tokens=0, settled_at=now())
    await session.execute(
        update(Turn)
        .where(Turn.id == id, Turn.state == TurnState.OPEN)
        .values(
            state=TurnState.FAILED if state == RolloutState.FAILED else TurnState.ABORTED,
            finish_reason=NOT_ASKED,
            exclusion_reason=func.coalesce(Turn.exclusion_reason, reason),
            finished_at=now(),
            processed=True,
        )
        .execution_options(synchronize_session=False)
    )
    await curate.reconsider(session, {id}, settings)
    enqueue_after_commit(session, "judge", "assemble")


async def let_go(session: AsyncSession, id: str, fence: int, attempt: int, reason: str) -> None:
    """For another attempt, after a pause that grows. Raises LeaseLost."""
    await leases.finish(
        session,
        Rollout,
        id,
        fence=fence,
        state=RolloutState.OPEN,
        due_at=now() + pause(attempt),
        tokens=0,
        reason=plain(reason),
    )
