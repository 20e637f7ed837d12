"""Response bodies of the policies API."""

from typing import Any, Literal

from pydantic import BaseModel, Field

from app.models import Policy, Version
from app.policies.references import version_name


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
    tainted_at: float | None = Field(
        description="when data that the version or one of its ancestors learned from was erased"
    )
    untainted_ancestor: str | None = Field(
        description="the version to roll back to if this one learned from erased data"
    )

    @classmethod
    def of(
        cls,
        policy: Policy,
        version: Version,
        *,
        serving: bool,
        parent: int | None,
        stats: dict[str, Any],
        delay: float | None,
        tainted_at: float | None = None,
        untainted_ancestor: Version | None = None,
    ) -> "VersionView":
        return cls(
            id=version.id,
            name=version_name(policy, version),
            number=version.number,
            parent=parent,
            state=version.state,
            serving=serving,
            reason=version.reason,
            created_at=version.created_at,
            live_at=version.live_at,
            turns=stats.get("turns", 0),
            rated=stats.get("rated", 0),
            approval=stats.get("approval"),
            mean_length=stats.get("mean_length", 0.0),
            alignment_delay=delay,
            metrics=version.metrics,
            timings=version.timings,
            tainted_at=tainted_at,
            untainted_ancestor=version_name(policy, untainted_ancestor) if untainted_ancestor else None,
        )


class PolicyView(BaseModel):
    object: Literal["policy"] = "policy"
    id: str
    name: str
    base_model: str
    serving: str
    previous: str | None
    canary: str | None = Field(description="the version that serves a share of the conversations")
    canary_share: float
    shadow: str | None = Field(description="the version whose replies to live prompts are judged but never returned")
    head: str = Field(description="the version that the next update starts from")
    epoch: int
    created_at: float
    mode: str = Field(description="of learning: asynchronous, synchronous (after an alarm of the KL guard) or halted")
    mode_reason: str | None
    mode_since: float | None
    kl_alarms: int = Field(description="alarms of the KL guard in a row")
    untainted_ancestor: str | None = Field(
        description="the version to roll back to if the serving one learned from erased data"
    )
