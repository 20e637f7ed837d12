"""/v1/audit: the audit log of a project, the newest entries first, and the verification of its hash chain."""

from typing import Annotated, Literal

from fastapi import APIRouter, Query
from pydantic import BaseModel
from sqlalchemy import select

from alignment.json_values import JsonObject
from app.core.errors import ERROR_RESPONSES
from app.core.http import RowView
from app.core.pagination import apply_keyset
from app.models import Audit
from app.ops import audit_chain
from app.ops.audit_chain import AuditVerification
from app.projects.auth import DatabaseDep, LongRunningDatabaseDep, ViewingCaller

router = APIRouter(prefix="/v1", tags=["audit"], responses=ERROR_RESPONSES)
ExactFilter = Annotated[str | None, Query(min_length=1, max_length=128)]
Seconds = Annotated[float | None, Query(ge=0, le=1e12, allow_inf_nan=False, description="unix seconds")]


class AuditView(RowView):
    object: Literal["audit.entry"] = "audit.entry"
    number: int
    created_at: float
    actor: str
    action: str
    subject: str
    reason: str | None
    details: JsonObject


class AuditPage(BaseModel):
    """`last_number` is the `after` of the next page."""

    object: Literal["list"] = "list"
    data: list[AuditView]
    last_number: int | None
    has_more: bool


@router.get("/audit")
async def list_audit(
    caller: ViewingCaller,
    db: DatabaseDep,
    action: ExactFilter = None,
    subject: ExactFilter = None,
    actor: ExactFilter = None,
    since: Seconds = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    after: Annotated[int | None, Query(ge=0, le=2**63 - 1, description="an entry's number")] = None,
    order: Literal["asc", "desc"] = "desc",
) -> AuditPage:
    """The filters match exactly."""
    query = select(Audit).where(Audit.project_id == caller.project_id)
    for column, value in ((Audit.action, action), (Audit.subject, subject), (Audit.actor, actor)):
        if value is not None:
            query = query.where(column == value)
    if since is not None:
        query = query.where(Audit.created_at >= since)
    last = None if after is None else (after,)
    query = apply_keyset(query, (Audit.seq,), last, limit, descending=order == "desc")
    async with db.read() as session:
        rows = (await session.scalars(query)).all()
    data = [AuditView.from_row(row, number=row.seq) for row in rows[:limit]]
    return AuditPage(data=data, last_number=data[-1].number if data else None, has_more=len(rows) > limit)


@router.get("/audit/verify")
async def verify_audit(
    caller: ViewingCaller,
    db: LongRunningDatabaseDep,
    known_hash: Annotated[
        str | None, Query(pattern="^[0-9a-f]{64}$", description="the `head` of an earlier call")
    ] = None,
) -> AuditVerification:
    """Compute the hash chain of the project's entries again, and name the first entry that does not fit."""
    return await audit_chain.verify_chain(db, caller.project_id, known_hash)
