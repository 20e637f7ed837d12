"""Attempts that nobody has claimed again after their process died: their episodes do not stay open for long."""

from sqlalchemy import select

from app.core.database import Database, now
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
    in_order = select(RunAttempt.id).where(*is_expired).order_by(RunAttempt.lease_until, RunAttempt.id)
    async with db.read() as session:
        ids = (await session.scalars(in_order.limit(MAX_SETTLED))).all()
    num_settled = 0
    for id in ids:
        async with db.write() as session:
            locking = select(RunAttempt).where(RunAttempt.id == id, *is_expired).with_for_update(skip_locked=True)
            attempt = await session.scalar(locking)
            if attempt is not None:
                run = await session.get_one(PlannedRun, attempt.run_id)
                await settle_expired(session, run.project_id, attempt)
                num_settled += 1
        await db.let_others_write()
    return num_settled
