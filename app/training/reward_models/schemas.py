"""Reward models on the wire."""

from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field

from app.models import Policy, RewardModel
from app.training.reward_models.service import label


class FitRequest(BaseModel):
    model_config = ConfigDict(extra="forbid")

    serve: bool = Field(True, description="once it is fitted, if it is good enough; else it waits to be told")
    reason: str | None = Field(None, min_length=1, max_length=2000, description="kept in the audit log")


class RewardModelView(BaseModel):
    object: Literal["reward_model"] = "reward_model"
    id: str
    name: str = Field(description='"assistant/rm-3"')
    number: int
    state: Literal["open", "trained", "serving", "disabled", "retired", "refused", "failed"]
    actor: str = Field(description="who brought it into this state")
    reason: str | None
    metrics: dict[str, Any] = Field(description="measured on words that were held out")
    pairs: int | None
    thumbs: int | None
    raters: int | None
    attempt: int
    manifest_sha256: str | None
    created_at: float
    settled_at: float | None
    served_at: float | None
    tainted_at: float | None = Field(description="since when it has learned from what is erased; it never serves again")

    @classmethod
    def of(cls, policy: Policy, row: RewardModel) -> Self:
        same = ("id", "number", "state", "actor", "reason", "metrics", "attempt", "manifest_sha256", "created_at")
        more = ("settled_at", "served_at", "tainted_at")
        return cls(
            **{name: getattr(row, name) for name in (*same, *more)},
            name=label(policy, row),
            pairs=row.num_pairs,
            thumbs=row.num_thumbs,
            raters=row.num_raters,
        )


class WithPeople(BaseModel):
    """How the one that serves stands with what people have said since."""

    words: int = Field(description="their latest about replies that it had judged; below 30 nothing is concluded")
    agreement: float | None
    at_most: float | None = Field(description="an upper bound; below `min_agreement` the model is silenced")
    min_agreement: float


class RewardModelList(BaseModel):
    object: Literal["list"] = "list"
    policy: str
    serving: str | None
    people: WithPeople | None = Field(description="null when none serves")
    data: list[RewardModelView] = Field(description="the newest first")
