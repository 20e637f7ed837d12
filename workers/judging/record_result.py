"""Answers → Rewards: each judgement is settled once, under its fence, and its reward with it."""

import logging
from collections.abc import Mapping
from typing import Any

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from app.core import leases
from app.core.database import now
from app.core.jobs import enqueue_after_commit
from app.core.settings import Settings
from app.models import Judgement, JudgementState, Turn
from workers.feedback import curate, group_samples, rater_trust, signals
from workers.judging.request import DELETED, Answer, Claim, Meter
from workers.queue.retry import pause, plain

log = logging.getLogger("attune.judge")


async def done(
    session: AsyncSession,
    settings: Settings,
    claim: Claim,
    answer: Answer,
    details: Mapping[str, Any],
    *,
    users_own: bool = False,
) -> None:
    """`users_own`: it is what the user said next, whoever has read it."""
    if await _deleted(session, claim):
        await _close(session, settings, claim, JudgementState.SKIPPED, DELETED, details)
        return
    rater, weight = None, 1.0
    if users_own:
        [turn] = await signals.turns(session, [claim.turn_id])
        rater, weight = signals.who(turn), rater_trust.newcomer(settings).weight
    await curate.note(session, claim.turn_id, claim.source, answer.value, rater=rater, weight=weight)
    told = {"explanation": plain(answer.explanation)} if answer.explanation else {}
    await _close(session, settings, claim, JudgementState.DONE, None, {**details, **told}, value=answer.value)


async def closed(
    session: AsyncSession,
    settings: Settings,
    claim: Claim,
    state: JudgementState,
    reason: str,
    details: Mapping[str, Any],
) -> None:
    """Skipped or failed: the sample need not wait for it any longer."""
    reason = DELETED if await _deleted(session, claim) else reason
    await _close(session, settings, claim, state, reason, details)


async def let_go(session: AsyncSession, claim: Claim, reason: str, details: Mapping[str, Any]) -> None:
    """For another attempt, after a pause that grows."""
    log.warning("%s said nothing of %s, attempt %d: %s", claim.source, claim.turn_id, claim.attempt, plain(reason))
    await leases.finish(
        session,
        Judgement,
        claim.id,
        fence=claim.fence,
        state=JudgementState.OPEN,
        due_at=now() + pause(claim.attempt),
        reason=plain(reason),
        details=dict(details),
    )


async def wait(session: AsyncSession, claim: Claim, seconds: float) -> None:
    """Nothing was asked: this was no attempt."""
    await leases.finish(
        session,
        Judgement,
        claim.id,
        fence=claim.fence,
        state=JudgementState.OPEN,
        due_at=now() + seconds,
        attempt=claim.attempt - 1,
    )


def details_of(claim: Claim, meter: Meter, seconds: float) -> dict[str, Any]:
    """All attempts' questions; the last one's tokens and seconds."""
    told: dict[str, Any] = {"asks": claim.asks + meter.asks, "seconds": round(seconds, 3)}
    return told | ({"tokens": meter.tokens} if meter.tokens else {})


async def _close(
    session: AsyncSession,
    settings: Settings,
    claim: Claim,
    state: JudgementState,
    reason: str | None,
    details: Mapping[str, Any],
    *,
    value: float | None = None,
) -> None:
    await leases.finish(
        session,
        Judgement,
        claim.id,
        fence=claim.fence,
        state=state,
        value=value,
        details=dict(details),
        reason=None if reason is None else plain(reason),
        settled_at=now(),
    )
    await curate.reconsider(session, {claim.turn_id}, settings)
    enqueue_after_commit(session, "assemble")


async def _deleted(session: AsyncSession, claim: Claim) -> bool:
    """What was answered about a turn that was deleted meanwhile is not kept. The lock makes two sources that answer
    about one turn at the same time see each other's rewards."""
    await group_samples.lock(session, [claim.turn_id])
    return await session.scalar(select(Turn.deleted_at).where(Turn.id == claim.turn_id)) is not None
