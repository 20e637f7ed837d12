"""An admin's word on a rater, and what becomes of the samples that waited for it."""

from sqlalchemy.ext.asyncio import AsyncSession

from app.core.errors import NotFound
from app.core.jobs import enqueue_after_commit
from app.models import Rater, RaterStanding, Sample, record_audit
from app.raters import repository

BLOCKED = "its rater is blocked"


async def judge(
    session: AsyncSession, project_id: str, name: str, standing: RaterStanding, reason: str | None, *, actor: str
) -> tuple[Rater, int]:
    """Returns the rater and how many samples moved. A rater who has not spoken yet may be judged, too."""
    await repository.lock_words(session, project_id, name)
    row = await repository.rater(session, project_id, name)
    if row is None:
        row = await repository.newcomer(session, project_id, name)
    row.standing = standing
    row.reason = reason or f"{standing} by an admin"
    await session.flush()
    await session.refresh(row)
    moved = await _samples(session, project_id, name, standing, row.reason)
    record_audit(
        session, actor, f"{standing} rater", name[:128], reason, project_id=project_id, rater=name, samples=moved
    )
    return row, moved


async def _samples(session: AsyncSession, project_id: str, name: str, standing: RaterStanding, reason: str) -> int:
    if standing == RaterStanding.QUARANTINED:
        return await repository.quarantine_samples(session, project_id, name, reason)
    enqueue_after_commit(session, "curate", "assemble")
    if standing == RaterStanding.BLOCKED:
        return await repository.drop_samples(session, project_id, name, BLOCKED)
    return await repository.release_samples(session, project_id, name)


async def quarantined(
    session: AsyncSession, project_id: str, after: str | None, limit: int
) -> list[tuple[Sample, str, str]]:
    """A page of what waits for an admin. Raises NotFound for a cursor that is no turn of this project."""
    place = None
    if after is not None:
        place = await repository.place(session, project_id, after)
        if place is None:
            raise NotFound(f"There is no sample of a turn '{after}'.", param="after")
    return await repository.quarantine_page(session, project_id, place, limit)
