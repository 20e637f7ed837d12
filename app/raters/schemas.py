"""Requests and views of the raters API."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from alignment.signals import rater_trust
from app.core.pagination import Page
from app.models import Rater, RaterStanding, Sample

NAME = r"^[^\x00/]+/[^\x00]*$"  # "HUMAN/user-7", "end-user/7", "conversation/c-1"
Reason = Annotated[str, StringConstraints(min_length=1, max_length=1000)]


class StandingRequest(BaseModel):
    model_config = ConfigDict(extra="forbid")

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
    def of(cls, row: Rater) -> "RaterView":
        return cls(
            name=row.name,
            standing=RaterStanding(row.standing),
            reason=row.reason,
            num_up=row.num_up,
            num_down=row.num_down,
            agreed=row.agreement_weight,
            disagreed=row.disagreement_weight,
            reliability=rater_trust.reliability(row.agreement_weight, row.disagreement_weight),
            weight=rater_trust.rater_weight(row.agreement_weight, row.disagreement_weight),
            created_at=row.created_at,
        )


class RaterStandingView(RaterView):
    samples: int = Field(description="number of samples that were quarantined, released or dropped by this request")


class RaterList(Page[RaterView]):
    @classmethod
    def of(cls, rows: list[Rater], limit: int) -> "RaterList":
        """Build a page from up to `limit + 1` rows."""
        return cls.from_rows([RaterView.of(row) for row in rows], limit, id="name")


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

    @classmethod
    def of(cls, sample: Sample, policy: str, completion_id: str) -> "QuarantineView":
        return cls(
            turn_id=sample.turn_id,
            completion_id=completion_id,
            policy=policy,
            reward=sample.reward,
            reason=sample.reason,
            rater=sample.rater,
            conversation_id=sample.conversation_id,
            created_at=sample.created_at,
        )


class QuarantineList(Page[QuarantineView]):
    @classmethod
    def of(cls, rows: list[tuple[Sample, str, str]], limit: int) -> "QuarantineList":
        return cls.from_rows([QuarantineView.of(*row) for row in rows], limit, id="turn_id")
