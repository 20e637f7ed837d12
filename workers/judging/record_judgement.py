"""Answers → rewards: each judgement gets its result once, under its fence, in one transaction with its reward."""

from collections.abc import Mapping
from typing import Any

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from app.core import leases
from app.core.database import now
from app.core.jobs import enqueue_after_commit
from app.core.settings import Settings
from app.models import Judgement, JudgementState, Turn
from workers.feedback import group_samples, rater_trust, rewards, signals
from workers.judging.judgement_queue import JudgementLease
from workers.judging.request import DELETED, Answer, Usage
from workers.queue.retry import sanitize_text


async def record_answer(
    session: AsyncSession,
    settings: Settings,
    lease: JudgementLease,
    answer: Answer,
    details: Mapping[str, Any],
    *,
    is_from_user: bool = False,
) -> None:
    """Store the reward. `is_from_user`: the evidence is the user's next message, so the user is its rater.

    Raises LeaseLost.
    """
    if await _is_deleted(session, lease):
        await _finish(session, settings, lease, JudgementState.SKIPPED, DELETED, details)
        return
    rater, weight = None, 1.0
    if is_from_user:
        [turn] = await signals.read_finished_turns(session, [lease.turn_id])
        rater, weight = signals.end_user_rater(turn), rater_trust.newcomer_trust(settings).weight
    await rewards.record_reward(session, lease.turn_id, lease.source, answer.value, rater=rater, weight=weight)
    if answer.explanation:
        details = {**details, "explanation": sanitize_text(answer.explanation)}
    await _finish(session, settings, lease, JudgementState.DONE, None, details, value=answer.value)


async def record_no_answer(
    session: AsyncSession,
    settings: Settings,
    lease: JudgementLease,
    state: JudgementState,
    reason: str,
    details: Mapping[str, Any],
) -> None:
    """Record that the judgement was skipped or failed: the sample no longer waits for it. Raises LeaseLost."""
    reason = DELETED if await _is_deleted(session, lease) else reason
    await _finish(session, settings, lease, state, reason, details)


def build_details(lease: JudgementLease, usage: Usage, seconds: float) -> dict[str, Any]:
    """Return the `details` column: the requests of all attempts, and the tokens and seconds of the last one."""
    details: dict[str, Any] = {"requests": lease.num_requests + usage.requests, "seconds": round(seconds, 3)}
    return details | ({"tokens": usage.tokens} if usage.tokens else {})


async def _finish(
    session: AsyncSession,
    settings: Settings,
    lease: JudgementLease,
    state: JudgementState,
    reason: str | None,
    details: Mapping[str, Any],
    *,
    value: float | None = None,
) -> None:
    await leases.finish(
        session,
        Judgement,
        lease.id,
        fence=lease.fence,
        state=state,
        value=value,
        details=dict(details),
        reason=None if reason is None else sanitize_text(reason),
        settled_at=now(),
    )
    await rewards.update_turn_samples(session, {lease.turn_id}, settings)
    enqueue_after_commit(session, "assemble")


async def _is_deleted(session: AsyncSession, lease: JudgementLease) -> bool:
    """Lock the group and return whether the turn was deleted meanwhile: then its answer must not be stored.

    The lock lets two sources that answer about one turn at the same time see each other's rewards.
    """
    await group_samples.lock_groups(session, [lease.turn_id])
    return await session.scalar(select(Turn.deleted_at).where(Turn.id == lease.turn_id)) is not None
