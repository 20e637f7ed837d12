"""How versions reach people, on the wire."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from alignment.release.canary import Arm, CanaryConfig, Verdict
from alignment.release.shadow import Pairs, ShadowConfig
from app.models import ConversationRouting

Number = Field(ge=0, le=999_999_999)


class DeployRequest(BaseModel):
    model_config = ConfigDict(extra="forbid")

    version: int = Number
    share: float | None = Field(
        None, gt=0, lt=1, description="of the conversations; the version is a canary then. Unset: everybody's"
    )
    watch: bool = Field(True, description="the canary goes live or is taken back by itself, as its figures say")
    reason: str | None = Field(None, min_length=1, max_length=2000, description="kept in the audit log")


class DeliveryRequest(BaseModel):
    """How versions of this policy reach people from now on."""

    model_config = ConfigDict(extra="forbid")

    conversations: ConversationRouting = Field(
        ConversationRouting.FOLLOW, description="follow the pointer, or stay on the version they began with"
    )
    canary: CanaryConfig | None = Field(
        None, description="each new version answers a share first and is watched; the deployment's setting when null"
    )
    shadow: ShadowConfig | None = Field(
        None, description="before that it answers beside what serves, unheard; the deployment's setting when null"
    )


class ArmView(BaseModel):
    """One side of the comparison, since the canary is out or the shadow deployment began."""

    version: str
    turns: int = Field(description="users, or conversations where requests name no user, that it answered; each once")
    failed: int = Field(description="of them, those of whom a reply failed")
    rated: int = Field(description="raters, each of whom has one vote; of a shadow deployment its judged pairs")
    good: int
    approval: float | None
    mean_length: float | None
    seconds_per_token: float | None

    @classmethod
    def of(cls, version: str, arm: Arm) -> "ArmView":
        return cls(
            version=version,
            turns=arm.turns,
            failed=arm.failed,
            rated=arm.rated,
            good=arm.good,
            approval=arm.good / arm.rated if arm.rated else None,
            mean_length=arm.mean_length,
            seconds_per_token=arm.seconds_per_token,
        )


class CanaryView(BaseModel):
    object: Literal["canary"] = "canary"
    version: str
    share: float
    since: float
    until: float = Field(description="when patience ends: what was heard by then decides, if it is watched")
    watched: bool
    candidate: ArmView
    stable: ArmView
    verdict: str = Field(description="what its figures say now: wait, promote or roll_back")
    reason: str
    figures: dict[str, Any]

    @classmethod
    def of(
        cls,
        *,
        share: float,
        since: float,
        until: float,
        watched: bool,
        candidate: ArmView,
        stable: ArmView,
        verdict: Verdict,
    ) -> "CanaryView":
        return cls(
            version=candidate.version,
            share=share,
            since=since,
            until=until,
            watched=watched,
            candidate=candidate,
            stable=stable,
            verdict=verdict.action,
            reason=verdict.reason,
            figures=dict(verdict.figures),
        )


class ShadowView(BaseModel):
    object: Literal["shadow"] = "shadow"
    version: str
    share: float = Field(description="of the replies of what serves")
    since: float
    candidate: ArmView
    stable: ArmView
    better: int = Field(description="pairs, each speaker's once, of which the candidate's reply was judged better")
    alike: int
    worse: int
    idle: str | None = Field(description="why it cannot be passed; null if it can")
    verdict: str = Field(description="what its figures say now: wait, promote, reject or lapse (too little was heard)")
    reason: str
    figures: dict[str, Any]

    @classmethod
    def of(
        cls,
        *,
        share: float,
        since: float,
        candidate: ArmView,
        stable: ArmView,
        pairs: Pairs,
        idle: str | None,
        verdict: Verdict,
    ) -> "ShadowView":
        return cls(
            version=candidate.version,
            share=share,
            since=since,
            candidate=candidate,
            stable=stable,
            better=pairs.better,
            alike=pairs.alike,
            worse=pairs.worse,
            idle=idle,
            verdict=verdict.action,
            reason=verdict.reason,
            figures=dict(verdict.figures),
        )


class DeploymentView(BaseModel):
    object: Literal["deployment"] = "deployment"
    policy: str
    serving: str
    previous: str | None
    canary: CanaryView | None
    shadow: ShadowView | None
    epoch: int = Field(description="moves of the pointer so far")
    changed_at: float | None
    conversations: ConversationRouting
    own_canary: bool = Field(description="whether the policy has a canary setting of its own")
    canary_config: CanaryConfig | None = Field(description="how a new version goes out; null when it goes live at once")
    own_shadow: bool = Field(description="whether the policy has a shadow deployment setting of its own")
    shadow_config: ShadowConfig | None = Field(
        description="how a new version runs in shadow first; null when it does not"
    )
