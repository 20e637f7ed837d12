"""Endpoints and views of raters (/v1/raters) and quarantined samples (/v1/quarantine)."""

from typing import Annotated, Literal, Self

from fastapi import APIRouter, Path, Query
from pydantic import BaseModel, Field, StringConstraints

from alignment.signals import rater_trust
from app.core.errors import ERROR_RESPONSES
from app.core.http import StrictModel, json_body
from app.core.pagination import Page
from app.models import Rater, RaterStanding
from app.projects.auth import ContentCaller, DatabaseDep, LongRunningDatabaseDep, OperatingCaller
from app.raters import service

router = APIRouter(prefix="/v1", tags=["raters"], responses=ERROR_RESPONSES)
NAME = r"^[^\x00/]+/[^\x00]*$"  # "HUMAN/user-7", "end-user/7", "conversation/c-1"
RaterName = Annotated[str, Path(min_length=3, max_length=320, pattern=NAME)]
Reason = Annotated[str, StringConstraints(min_length=1, max_length=1000)]
Limit = Annotated[int, Query(ge=1, le=100)]


class StandingRequest(StrictModel):
    standing: Literal["normal", "trusted", "quarantined", "blocked"] = Field(
        description="normal: releases quarantined samples; trusted: never quarantined; blocked: excluded from training"
    )
    reason: Reason | None = Field(None, description="stored with the rater and in the audit log")


class RaterView(BaseModel):
    object: Literal["rater"] = "rater"
    name: str
    standing: RaterStanding
    reason: str | None
    num_up: int
    num_down: int
    agreed: float
    disagreed: float
    reliability: float = Field(description="probability of agreement with other raters; 0.7 for a new rater")
    weight: float = Field(description="trust in the rater, 0 to 1, computed from feedback alone")
    created_at: float

    @classmethod
    def of(cls, row: Rater, **more: int) -> Self:
        agreed, disagreed = row.agreement_weight, row.disagreement_weight
        computed = {
            "reliability": rater_trust.reliability(agreed, disagreed),
            "weight": rater_trust.rater_weight(agreed, disagreed),
        }
        return cls.model_validate({**vars(row), "agreed": agreed, "disagreed": disagreed, **computed, **more})


class RaterStandingView(RaterView):
    samples: int = Field(description="number of samples that were quarantined, released or dropped by this request")


class RaterList(Page[RaterView]):
    pass


class QuarantineView(BaseModel):
    object: Literal["quarantined"] = "quarantined"
    turn_id: str
    completion_id: str
    policy: str
    reward: float
    reason: str | None
    rater: str | None = Field(description="the rater whose reward has the largest weight")
    conversation_id: str | None
    created_at: float


class QuarantineList(Page[QuarantineView]):
    pass


@router.get("/raters")
async def list_raters(
    caller: ContentCaller,
    db: DatabaseDep,
    standing: RaterStanding | None = None,
    limit: Limit = 20,
    after: Annotated[str | None, Query(min_length=1, max_length=320, pattern=NAME)] = None,
) -> RaterList:
    """List the raters by name."""
    async with db.read() as session:
        rows = await service.list_raters(session, caller.project_id, standing, after, limit)
    return RaterList.from_rows([RaterView.of(row) for row in rows], limit, id="name")


@router.put("/raters/{rater:path}")
async def set_rater_standing(
    rater: RaterName,
    caller: OperatingCaller,
    db: LongRunningDatabaseDep,
    body: Annotated[StandingRequest, json_body(StandingRequest)],
) -> RaterStandingView:
    """Set the standing of a rater. Idempotent. Samples that are already in a batch stay there."""
    change = (caller.project_id, rater, RaterStanding(body.standing), body.reason)
    row, num_samples = await db.retry_on_deadlock(
        lambda session: service.set_standing(session, *change, actor=caller.key_prefix)
    )
    return RaterStandingView.of(row, samples=num_samples)


@router.get("/quarantine")
async def list_quarantine(
    caller: ContentCaller,
    db: DatabaseDep,
    limit: Limit = 20,
    after: Annotated[str | None, Query(min_length=1, max_length=48)] = None,
) -> QuarantineList:
    """List the samples that are quarantined until an admin decides on their rater, the oldest first."""
    async with db.read() as session:
        rows = await service.list_quarantined(session, caller.project_id, after, limit)
    return QuarantineList.from_rows([QuarantineView(**row) for row in rows], limit, id="turn_id")
