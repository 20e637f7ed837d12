"""What the policies API says and hears."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from app.models import Policy, Version
from app.policies.service import label


class RollbackRequest(BaseModel):
    model_config = ConfigDict(extra="forbid")

    version: int | None = Field(
        None, ge=0, le=999_999_999, description="the number to go back to; the serving version's parent if unset"
    )
    reason: str | None = Field(None, max_length=2000)


class RollbackResult(BaseModel):
    object: Literal["rollback"] = "rollback"
    policy: str
    left: str
    serving: str


class VersionView(BaseModel):
    object: Literal["version"] = "version"
    id: str
    name: str
    number: int
    parent: int | None
    state: str
    serving: bool
    reason: str | None
    created_at: float
    live_at: float | None
    turns: int
    rated: int
    approval: float | None
    mean_length: float
    alignment_delay: float | None
    metrics: dict[str, Any]
    timings: dict[str, Any]

    @classmethod
    def of(
        cls,
        policy: Policy,
        version: Version,
        *,
        serving: bool,
        parent: int | None,
        voice: dict[str, Any],
        delay: float | None,
    ) -> "VersionView":
        return cls(
            id=version.id,
            name=label(policy, version),
            number=version.number,
            parent=parent,
            state=version.state,
            serving=serving,
            reason=version.reason,
            created_at=version.created_at,
            live_at=version.live_at,
            turns=voice.get("turns", 0),
            rated=voice.get("rated", 0),
            approval=voice.get("approval"),
            mean_length=voice.get("mean_length", 0.0),
            alignment_delay=delay,
            metrics=version.metrics,
            timings=version.timings,
        )


class PolicyView(BaseModel):
    object: Literal["policy"] = "policy"
    id: str
    name: str
    base_model: str
    serving: str
    previous: str | None
    head: str
    epoch: int
    created_at: float
