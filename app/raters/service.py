"""Set the standing of a rater and update the samples that depend on it."""

from sqlalchemy.ext.asyncio import AsyncSession

from app.core.errors import NotFound
from app.core.jobs import enqueue_after_commit
from app.models import AuditAction, Rater, RaterStanding, Sample, record_audit
from app.raters import repository

BLOCKED = "its rater is blocked"


async def set_standing(
    session: AsyncSession, project_id: str, name: str, standing: RaterStanding, reason: str | None, *, actor: str
) -> tuple[Rater, int]:
    """Set a rater's standing; the rater need not exist yet. Returns the rater and the number of updated samples."""
    await repository.lock_rewards(session, project_id, name)
    row = await repository.lock_rater(session, project_id, name)
    if row is None:
        row = await repository.create_rater(session, project_id, name)
    row.standing = standing
    row.reason = reason or f"{standing} by an admin"
    await session.flush()
    await session.refresh(row)
    num_samples = await _update_samples(session, project_id, name, standing, row.reason)
    record_audit(
        session,
        actor,
        AuditAction(f"rater.{standing}"),
        name[:128],
        reason,
        project_id=project_id,
        rater=name,
        samples=num_samples,
    )
    return row, num_samples


async def _update_samples(
    session: AsyncSession, project_id: str, name: str, standing: RaterStanding, reason: str
) -> int:
    if standing == RaterStanding.QUARANTINED:
        return await repository.quarantine_samples(session, project_id, name, reason)
    enqueue_after_commit(session, "curate", "assemble")
    if standing == RaterStanding.BLOCKED:
        return await repository.drop_samples(session, project_id, name, BLOCKED)
    return await repository.release_samples(session, project_id, name)


async def list_quarantined(
    session: AsyncSession, project_id: str, after: str | None, limit: int
) -> list[tuple[Sample, str, str]]:
    """Return a page of quarantined samples. Raises NotFound if `after` is no sample of this project."""
    position = None
    if after is not None:
        position = await repository.find_sample_position(session, project_id, after)
        if position is None:
            raise NotFound(f"There is no sample of a turn '{after}'.", param="after")
    return await repository.list_quarantined(session, project_id, position, limit)
