"""What the raters API says and hears."""

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
        description="normal: what was held is released; trusted: never doubted; blocked: never learned from"
    )
    reason: Reason | None = Field(None, description="kept with the rater and in the audit log")


class RaterView(BaseModel):
    object: Literal["rater"] = "rater"
    name: str
    standing: RaterStanding
    reason: str | None
    num_up: int
    num_down: int
    agreed: float
    disagreed: float
    reliability: float = Field(description="how likely this rater is to agree with others, 0.7 for a newcomer")
    weight: float = Field(description="how far the rater is believed, 0 to 1, as feedback alone has it")
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
            weight=rater_trust.weight(row.agreement_weight, row.disagreement_weight),
            created_at=row.created_at,
        )


class JudgedRaterView(RaterView):
    samples: int = Field(description="that were held, released or dropped by this")


class RaterList(Page[RaterView]):
    @classmethod
    def of(cls, rows: list[Rater], limit: int) -> "RaterList":
        """From up to one row more than was asked for."""
        return cls.cut([RaterView.of(row) for row in rows], limit, id="name")


class QuarantineView(BaseModel):
    object: Literal["quarantined"] = "quarantined"
    turn_id: str
    completion_id: str
    policy: str
    reward: float
    reason: str | None
    rater: str | None = Field(description="the person whose word weighs most in it")
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
        return cls.cut([QuarantineView.of(*row) for row in rows], limit, id="turn_id")
