"""Attempts that nobody has claimed again after their process died: their episodes do not stay open for long."""

import random

from sqlalchemy import select

from app.core.database import Database, now
from app.core.run_each import run_each, take_turns
from app.core.settings import Settings
from app.environments.claims import settle_expired
from app.models import AttemptState, PlannedRun, RunAttempt

MAX_SETTLED = 100  # in one pass, each in a transaction of its own


async def settle_attempts(db: Database, settings: Settings) -> int:
    """Take the attempts whose lease ran out one lease ago from who held them. Returns their number.

    A claim takes them at once. Here they have longer, since their process may only be slow, or cut off for a moment.
    """
    is_expired = (
        RunAttempt.state == AttemptState.OPEN,
        RunAttempt.lease_until < now() - settings.workers.lease_seconds,
    )
    expired = (
        select(PlannedRun.project_id, RunAttempt.id)
        .join(PlannedRun, PlannedRun.id == RunAttempt.run_id)
        .where(*is_expired)
        .order_by(RunAttempt.lease_until, RunAttempt.id)
    )

    async def settle(attempt_id: str) -> int:
        async with db.write() as session:
            locking = select(RunAttempt).where(RunAttempt.id == attempt_id, *is_expired)
            attempt = await session.scalar(locking.with_for_update(skip_locked=True))
            if attempt is None:
                return 0
            run = await session.get_one(PlannedRun, attempt.run_id)
            await settle_expired(session, run.project_id, attempt)
        await db.let_others_write()
        return 1

    async with db.read() as session:
        pairs = list((await session.execute(expired)).tuples())
    # Attempts that fail in every pass hold up no others: those of a project come in random order, and the bound comes
    # after the turns of the projects.
    attempt_ids = take_turns(random.sample(pairs, len(pairs)))
    return await run_each(attempt_ids[:MAX_SETTLED], settle, "settling the attempt")
