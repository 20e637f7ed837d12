"""Rollouts on the wire."""

from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field

from alignment.signals.verifiers import VerifierConfig
from app.core.pagination import Page
from app.models import RolloutPlan
from app.training.rollouts.repository import Tally

States = Literal["running", "paused", "done", "failed", "cancelled"]


class PlanRequest(BaseModel):
    model_config = ConfigDict(extra="forbid")

    dataset: str = Field(min_length=1, max_length=64, description="its name or id; of the kind prompts")
    verifier: VerifierConfig
    n: int = Field(8, ge=2, le=16, description="replies to each prompt: they are compared with one another")
    passes: int = Field(1, ge=1, le=1000, description="over the whole dataset")
    temperature: float = Field(1.0, ge=0.01, le=2)
    max_tokens: int | None = Field(None, ge=1, description="of one reply; the deployment's if unset")
    prompts_per_version: int | None = Field(
        None, ge=1, le=100_000, description="asked of a version, until the next one serves; if unset what a batch holds"
    )


class TallyView(BaseModel):
    open: int
    done: int
    skipped: int
    failed: int
    tokens: int = Field(description="that the replies hold, or may come to hold while they are being made")
    seconds: float = Field(description="of asking, one after the other")

    @classmethod
    def of(cls, tally: Tally) -> Self:
        return cls(**{name: getattr(tally, name) for name in cls.model_fields})


class PlanView(BaseModel):
    object: Literal["rollout_plan"] = "rollout_plan"
    id: str
    policy: str
    dataset: str
    dataset_id: str
    state: States
    reason: str | None
    n: int
    passes: int
    verifier: dict[str, Any]
    temperature: float
    max_tokens: int
    prompts_per_version: int | None
    num_prompts: int = Field(description="of the dataset")
    pass_number: int = Field(description="from 0")
    position: int = Field(description="the next prompt of this pass")
    replies: TallyView
    verified: int = Field(description="replies that its verifier has a number for")
    mean_reward: float | None
    created_at: float
    settled_at: float | None

    @classmethod
    def of(cls, policy: str, plan: RolloutPlan, tally: Tally) -> Self:
        kept = {name: getattr(plan, name) for name in cls.model_fields if hasattr(plan, name)}
        mean = tally.reward / tally.verified if tally.verified else None
        return cls(**kept, policy=policy, replies=TallyView.of(tally), verified=tally.verified, mean_reward=mean)


class PlanPage(Page[PlanView]):
    pass


class RolloutsView(BaseModel):
    object: Literal["rollouts"] = "rollouts"
    policy: str
    own: bool = Field(description="false: the deployment's")
    rollouts: dict[str, Any]
    idle: str | None = Field(description="why no group samples are drawn; null if they may have")
    group_sampling: TallyView
    prompt_sets: TallyView
    shadow_deployments: TallyView = Field(description="of versions beside what serves; never learned from")
    tokens_last_hour: int = Field(description="of group sampling: what counts against tokens_per_hour")
