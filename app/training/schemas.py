"""How learning is shown and steered, on the wire."""

from collections.abc import Mapping
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field

from app.core.pagination import Page
from app.models import Batch, Policy
from app.training.service import Waiting


class Reason(BaseModel):
    model_config = ConfigDict(extra="forbid")

    reason: str | None = Field(None, min_length=1, max_length=2000, description="kept in the audit log")


class SamplesView(BaseModel):
    open: int = Field(description="ripe: they may go into the next batch")
    not_ready: int = Field(description="late words are waited for")
    quarantined: int = Field(description="an admin has to look at them")


class UpdateView(BaseModel):
    """A batch, and what became of it."""

    object: Literal["update"] = "update"
    id: str
    state: str
    reason: str | None
    parent: str = Field(description="the version that it starts from")
    version: str | None = Field(description="the version that it became")
    samples: int
    raters: int | None
    attempt: int
    created_at: float
    claimed_at: float | None
    settled_at: float | None
    metrics: dict[str, Any]

    @classmethod
    def of(cls, policy: Policy, row: Batch, numbers: Mapping[str, int]) -> Self:
        became = numbers.get(row.version_id or "")
        same = ("id", "state", "reason", "attempt", "created_at", "claimed_at", "settled_at", "metrics")
        return cls(
            **{name: getattr(row, name) for name in same},
            parent=f"{policy.name}@v{numbers[row.parent_id]}",
            version=None if became is None else f"{policy.name}@v{became}",
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
    since: float | None = Field(description="when it came into this mode; null if it was never in another")
    alarms: int = Field(description="of the guard, in a row")
    samples: SamplesView
    raters: int = Field(description="distinct ones behind the open samples; what machines judged counts one each")
    batch_size: int
    triggered: bool = Field(description="a batch of two samples is enough, until one is frozen")
    missing: str = Field(description="what the next batch waits for")
    updates: list[UpdateView] = Field(description="the last ones, without their metrics")

    @classmethod
    def of(cls, policy: Policy, waits: Waiting, **more: Any) -> Self:
        return cls.model_validate(
            {
                "policy": policy.name,
                "mode": policy.mode,
                "reason": policy.mode_reason,
                "since": policy.mode_since,
                "alarms": policy.kl_alarms,
                "samples": SamplesView(open=waits.ripe, not_ready=waits.unripe, quarantined=waits.held),
                "raters": waits.raters,
                **more,
            }
        )


class RewardsView(BaseModel):
    object: Literal["rewards"] = "rewards"
    policy: str
    own: bool = Field(description="false: the deployment's")
    rewards: dict[str, Any]
