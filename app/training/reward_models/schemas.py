"""Request and response bodies of the reward models API."""

from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field

from app.models import Policy, RewardModel
from app.training.reward_models.repository import reward_model_name


class FitRequest(BaseModel):
    model_config = ConfigDict(extra="forbid")

    serve: bool = Field(True, description="whether it serves once it is fitted, if it is good enough")
    reason: str | None = Field(None, min_length=1, max_length=2000, description="kept in the audit log")


class RewardModelView(BaseModel):
    object: Literal["reward_model"] = "reward_model"
    id: str
    name: str = Field(description='such as "assistant/rm-3"')
    number: int
    state: Literal["open", "trained", "serving", "disabled", "retired", "refused", "failed"]
    actor: str = Field(description="who brought it into this state")
    reason: str | None
    metrics: dict[str, Any] = Field(description="measured on held-out labels")
    pairs: int | None
    binary_labels: int | None
    raters: int | None
    attempt: int
    manifest_sha256: str | None
    created_at: float
    settled_at: float | None
    served_at: float | None
    tainted_at: float | None = Field(
        description="when data that it learned from was erased; it cannot serve from then on"
    )

    @classmethod
    def of(cls, policy: Policy, row: RewardModel) -> Self:
        copied = (
            "id",
            "number",
            "state",
            "actor",
            "reason",
            "metrics",
            "attempt",
            "manifest_sha256",
            "created_at",
            "settled_at",
            "served_at",
            "tainted_at",
        )
        return cls(
            **{name: getattr(row, name) for name in copied},
            name=reward_model_name(policy, row),
            pairs=row.num_pairs,
            binary_labels=row.num_thumbs,
            raters=row.num_raters,
        )


class HumanAgreement(BaseModel):
    """How well the reward model that serves agrees with the feedback that people gave since."""

    labels: int = Field(description="people's latest labels of replies that it had scored; at least 30 are needed")
    agreement: float | None
    upper_bound: float | None = Field(description="of the agreement; below `min_agreement` the model is disabled")
    min_agreement: float


class RewardModelList(BaseModel):
    object: Literal["list"] = "list"
    policy: str
    serving: str | None
    human_agreement: HumanAgreement | None = Field(description="null when no reward model serves")
    data: list[RewardModelView] = Field(description="the newest first")
