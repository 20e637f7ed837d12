"""Endpoints of raters (/v1/raters) and quarantined samples (/v1/quarantine)."""

from typing import Annotated

from fastapi import APIRouter, Path, Query

from app.core.errors import ERROR_RESPONSES
from app.core.http import json_body
from app.models import RaterStanding
from app.projects.auth import AdminCaller, DatabaseDep, UnboundedDatabaseDep
from app.raters import repository, service
from app.raters.schemas import (
    NAME,
    QuarantineList,
    RaterList,
    RaterStandingView,
    RaterView,
    StandingRequest,
)

router = APIRouter(prefix="/v1", tags=["raters"], responses=ERROR_RESPONSES)
RaterName = Annotated[str, Path(min_length=3, max_length=320, pattern=NAME)]
Limit = Annotated[int, Query(ge=1, le=100)]


@router.get("/raters")
async def list_raters(
    caller: AdminCaller,
    db: DatabaseDep,
    standing: RaterStanding | None = None,
    limit: Limit = 20,
    after: Annotated[str | None, Query(min_length=1, max_length=320, pattern=NAME)] = None,
) -> RaterList:
    """List the raters by name."""
    async with db.read() as session:
        rows = await repository.list_raters(session, caller.project_id, standing, after, limit)
    return RaterList.of(rows, limit)


@router.put("/raters/{rater:path}")
async def set_rater_standing(
    rater: RaterName,
    caller: AdminCaller,
    db: UnboundedDatabaseDep,
    body: Annotated[StandingRequest, json_body(StandingRequest)],
) -> RaterStandingView:
    """Set the standing of a rater. Idempotent. Samples that are already in a batch stay there."""
    standing = RaterStanding(body.standing)
    row, num_samples = await db.retry_on_deadlock(
        lambda session: service.set_standing(
            session, caller.project_id, rater, standing, body.reason, actor=caller.key_prefix
        )
    )
    return RaterStandingView(**RaterView.of(row).model_dump(), samples=num_samples)


@router.get("/quarantine")
async def list_quarantine(
    caller: AdminCaller,
    db: DatabaseDep,
    limit: Limit = 20,
    after: Annotated[str | None, Query(min_length=1, max_length=48)] = None,
) -> QuarantineList:
    """List the samples that are quarantined until an admin decides on their rater, the oldest first."""
    async with db.read() as session:
        rows = await service.list_quarantined(session, caller.project_id, after, limit)
    return QuarantineList.of(rows, limit)
