"""Request and response bodies of the rollouts API."""

from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field

from alignment.signals.verifiers import VerifierConfig
from app.core.pagination import Page
from app.models import RolloutPlan
from app.training.rollouts.repository import RolloutCounts

PlanStates = Literal["running", "paused", "done", "failed", "cancelled"]


class PlanRequest(BaseModel):
    model_config = ConfigDict(extra="forbid")

    dataset: str = Field(min_length=1, max_length=64, description="name or id of a dataset of the kind prompts")
    verifier: VerifierConfig
    n: int = Field(8, ge=2, le=16, description="replies to each prompt, which are compared with each other")
    passes: int = Field(1, ge=1, le=1000, description="passes over the whole dataset")
    temperature: float = Field(1.0, ge=0.01, le=2)
    max_tokens: int | None = Field(None, ge=1, description="of one reply; null: the deployment's limit")
    prompts_per_version: int | None = Field(
        None, ge=1, le=100_000, description="prompts that one version answers; null: as many as a batch holds"
    )


class RolloutCountsView(BaseModel):
    open: int
    done: int
    skipped: int
    failed: int
    tokens: int = Field(description="of the replies; for running rollouts their budget")
    seconds: float = Field(description="sum of the rollouts' durations")

    @classmethod
    def of(cls, counts: RolloutCounts) -> Self:
        return cls(**{name: getattr(counts, name) for name in cls.model_fields})


class PlanView(BaseModel):
    object: Literal["rollout_plan"] = "rollout_plan"
    id: str
    policy: str
    dataset: str
    dataset_id: str
    state: PlanStates
    reason: str | None
    n: int
    passes: int
    verifier: dict[str, Any]
    temperature: float
    max_tokens: int
    prompts_per_version: int | None
    num_prompts: int = Field(description="prompts of the dataset")
    pass_number: int = Field(description="the current pass, from 0")
    position: int = Field(description="the next prompt of the current pass")
    replies: RolloutCountsView
    verified: int = Field(description="replies that the verifier has scored")
    mean_reward: float | None
    created_at: float
    settled_at: float | None

    @classmethod
    def of(cls, policy: str, plan: RolloutPlan, counts: RolloutCounts) -> Self:
        copied = {name: getattr(plan, name) for name in cls.model_fields if hasattr(plan, name)}
        mean = counts.reward / counts.verified if counts.verified else None
        return cls(
            **copied, policy=policy, replies=RolloutCountsView.of(counts), verified=counts.verified, mean_reward=mean
        )


class PlanPage(Page[PlanView]):
    pass


class RolloutsView(BaseModel):
    object: Literal["rollouts"] = "rollouts"
    policy: str
    overridden: bool = Field(description="whether the policy overrides the deployment's settings")
    rollouts: dict[str, Any]
    disabled_reason: str | None = Field(description="why no group samples are drawn; null if they are")
    group_sampling: RolloutCountsView
    prompt_sets: RolloutCountsView
    shadow_deployments: RolloutCountsView = Field(description="replies of versions in shadow; never trained on")
    tokens_last_hour: int = Field(description="of group sampling; counts against tokens_per_hour")
