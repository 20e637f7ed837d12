"""Request and response bodies of the training and rewards APIs."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field

from app.core.http import json_body
from app.core.pagination import Page
from app.models import Batch, Policy
from app.policies.references import format_reference
from app.training.service import SampleCounts


class Reason(BaseModel):
    model_config = ConfigDict(extra="forbid")

    reason: str | None = Field(None, min_length=1, max_length=2000, description="kept in the audit log")


ReasonBody = Annotated[Reason, json_body(Reason)]


class SamplesView(BaseModel):
    open: int = Field(description="ready for the next batch")
    not_ready: int = Field(description="waiting for late feedback")
    quarantined: int = Field(description="waiting for an admin's decision")


class UpdateView(BaseModel):
    """A batch and the result of its update."""

    object: Literal["update"] = "update"
    id: str
    state: str
    reason: str | None
    parent: str = Field(description="the version that the update starts from")
    version: str | None = Field(description="the version that it produced")
    samples: int
    raters: int | None
    attempt: int
    created_at: float
    claimed_at: float | None
    settled_at: float | None
    metrics: dict[str, Any]

    @classmethod
    def of(cls, policy: Policy, row: Batch, numbers: Mapping[str, int]) -> Self:
        """`numbers`: the numbers of versions by id."""
        number = numbers.get(row.version_id or "")
        copied = ("id", "state", "reason", "attempt", "created_at", "claimed_at", "settled_at", "metrics")
        return cls(
            **{name: getattr(row, name) for name in copied},
            parent=format_reference(policy.name, numbers[row.parent_id]),
            version=None if number is None else format_reference(policy.name, number),
            samples=row.num_samples,
            raters=row.num_raters,
        )


class UpdatePage(Page[UpdateView]):
    pass


class TrainingView(BaseModel):
    object: Literal["training"] = "training"
    policy: str
    mode: Literal["asynchronous", "synchronous", "halted"]
    reason: str | None
    since: float | None = Field(description="when the mode last changed; null if it never did")
    kl_alarms: int = Field(description="alarms of the KL guard in a row")
    samples: SamplesView
    raters: int = Field(description="distinct raters of the open samples; a sample without a rater counts as one")
    batch_size: int
    triggered: bool = Field(description="whether two samples are enough for the next batch")
    waiting_for: str = Field(description="what the next batch waits for")
    updates: list[UpdateView] = Field(description="the latest ones, without their metrics")

    @classmethod
    def of(cls, policy: Policy, counts: SampleCounts, **fields: Any) -> Self:
        return cls.model_validate(
            {
                "policy": policy.name,
                "mode": policy.mode,
                "reason": policy.mode_reason,
                "since": policy.mode_since,
                "kl_alarms": policy.kl_alarms,
                "samples": SamplesView(open=counts.ready, not_ready=counts.not_ready, quarantined=counts.quarantined),
                "raters": counts.raters,
                **fields,
            }
        )


class RewardsView(BaseModel):
    object: Literal["rewards"] = "rewards"
    policy: str
    overridden: bool = Field(description="whether the policy overrides the deployment's rewards")
    rewards: dict[str, Any]
