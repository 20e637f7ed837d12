"""Replies → turns: each rollout gets its result once, under its fence, with its turn, reward and samples."""

from dataclasses import dataclass

from sqlalchemy import func, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from alignment.config.rewards import VERIFIER
from app.chat.turn_writer import FINISH_TURNS, TurnEnd
from app.core import leases
from app.core.database import now
from app.core.jobs import enqueue_after_commit
from app.core.settings import Settings
from app.models import Rollout, RolloutState, Turn, TurnState
from workers.feedback import group_samples, rewards
from workers.queue.retry import sanitize_text

NOT_SAMPLED = "not_sampled"  # the finish reason of a turn that was planned and never sampled
DELETED = "the turn is deleted"


@dataclass(frozen=True)
class RolloutResult:
    """A sampled reply. `reward` is the verifier's; `reason` says why the reply has none."""

    turn_end: TurnEnd
    engine: str
    num_tokens: int
    seconds: float
    reward: float | None
    reason: str | None


async def record_reply(session: AsyncSession, settings: Settings, id: str, fence: int, result: RolloutResult) -> None:
    """Finish the rollout and its turn, and store the reward. Raises LeaseLost."""
    await group_samples.lock_groups(session, [id])
    deleted_at = await session.scalar(select(Turn.deleted_at).where(Turn.id == id))
    values = {"tokens": result.num_tokens, "duration_seconds": result.seconds, "settled_at": now()}
    if deleted_at is not None:
        await leases.finish(session, Rollout, id, fence=fence, state=RolloutState.SKIPPED, reason=DELETED, **values)
        return
    reason = None if result.reason is None else sanitize_text(result.reason)
    await leases.finish(
        session, Rollout, id, fence=fence, state=RolloutState.DONE, reward=result.reward, reason=reason, **values
    )
    set_engine = update(Turn).where(Turn.id == id).values(engine=result.engine)
    await session.execute(set_engine.execution_options(synchronize_session=False))
    await (await session.connection()).execute(FINISH_TURNS, [result.turn_end.values()])
    if result.reward is not None:
        await rewards.record_reward(session, id, VERIFIER, result.reward)
    await rewards.update_turn_samples(session, {id}, settings)
    enqueue_after_commit(session, "curate", "assemble", "rollout")


async def record_no_reply(
    session: AsyncSession, settings: Settings, id: str, fence: int, state: RolloutState, reason: str
) -> None:
    """Record that the rollout was skipped or failed: the samples of its group no longer wait for it.

    Raises LeaseLost.
    """
    await group_samples.lock_groups(session, [id])
    reason = sanitize_text(reason)
    await leases.finish(session, Rollout, id, fence=fence, state=state, reason=reason, tokens=0, settled_at=now())
    await session.execute(
        update(Turn)
        .where(Turn.id == id, Turn.state == TurnState.OPEN)
        .values(
            state=TurnState.FAILED if state == RolloutState.FAILED else TurnState.ABORTED,
            finish_reason=NOT_SAMPLED,
            exclusion_reason=func.coalesce(Turn.exclusion_reason, reason),
            finished_at=now(),
            processed=True,
        )
        .execution_options(synchronize_session=False)
    )
    await rewards.update_turn_samples(session, {id}, settings)
    enqueue_after_commit(session, "judge", "assemble")
