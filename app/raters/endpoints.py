"""/v1/raters and /v1/held: whom an admin believes, and what waits for that."""

from typing import Annotated

from fastapi import APIRouter, Path, Query

from app.core.errors import DOCUMENTED
from app.core.http import JsonBody, parse_body, request_body_schema
from app.models import RaterStanding
from app.projects.auth import AdminCaller, DatabaseDep, UnboundedDatabaseDep
from app.raters import repository, service
from app.raters.schemas import (
    NAME,
    JudgedRaterView,
    QuarantineList,
    RaterList,
    RaterView,
    StandingRequest,
)

router = APIRouter(prefix="/v1", tags=["raters"], responses=DOCUMENTED)
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
    async with db.read() as session:
        rows = await repository.raters(session, caller.project_id, standing, after, limit + 1)
    return RaterList.of(rows, limit)


@router.put("/raters/{rater:path}", openapi_extra=request_body_schema(StandingRequest))
async def judge_rater(
    rater: RaterName, caller: AdminCaller, db: UnboundedDatabaseDep, body: JsonBody
) -> JudgedRaterView:
    """Idempotent. Samples that are in a batch already are left there."""
    asked = parse_body(StandingRequest, body)
    standing = RaterStanding(asked.standing)
    row, moved = await db.retry_on_deadlock(
        lambda session: service.judge(
            session, caller.project_id, rater, standing, asked.reason, actor=caller.key_prefix
        )
    )
    return JudgedRaterView(**RaterView.of(row).model_dump(), samples=moved)


@router.get("/held")
async def list_quarantine(
    caller: AdminCaller,
    db: DatabaseDep,
    limit: Limit = 20,
    after: Annotated[str | None, Query(min_length=1, max_length=48)] = None,
) -> QuarantineList:
    """Samples that wait for an admin's word on their rater, the oldest first."""
    async with db.read() as session:
        rows = await service.quarantined(session, caller.project_id, after, limit + 1)
    return QuarantineList.of(rows, limit)
