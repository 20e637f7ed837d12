"""/v1/audit: a project's own entries, the newest first."""

from typing import Annotated, Literal

from fastapi import APIRouter, Query
from sqlalchemy import select

from app.core.errors import DOCUMENTED
from app.models import Audit
from app.ops.audit_schemas import AuditPage
from app.projects.auth import AdminCaller, DatabaseDep

router = APIRouter(prefix="/v1", tags=["audit"], responses=DOCUMENTED)
Exactly = Annotated[str | None, Query(min_length=1, max_length=128)]
Seconds = Annotated[float | None, Query(ge=0, le=1e12, allow_inf_nan=False, description="unix seconds")]


@router.get("/audit")
async def audit(
    caller: AdminCaller,
    db: DatabaseDep,
    action: Exactly = None,
    subject: Exactly = None,
    actor: Exactly = None,
    since: Seconds = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    after: Annotated[int | None, Query(ge=0, le=2**31 - 1, description="an entry's number")] = None,
    order: Literal["asc", "desc"] = "desc",
) -> AuditPage:
    asked = select(Audit).where(Audit.project_id == caller.project_id)
    for column, value in ((Audit.action, action), (Audit.subject, subject), (Audit.actor, actor)):
        if value is not None:
            asked = asked.where(column == value)
    if since is not None:
        asked = asked.where(Audit.created_at >= since)
    if after is not None:
        asked = asked.where(Audit.seq > after if order == "asc" else Audit.seq < after)
    asked = asked.order_by(Audit.seq if order == "asc" else Audit.seq.desc()).limit(limit + 1)
    async with db.read() as session:
        return AuditPage.of(list(await session.scalars(asked)), limit)
