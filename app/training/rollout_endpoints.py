"""/v1/policies/{name}/rollouts: rollout settings and statistics, and plans over prompt sets."""

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Path, Query
from pydantic import BaseModel, Field
from sqlalchemy.ext.asyncio import AsyncSession

from alignment.config.rollouts import RolloutsConfig
from alignment.signals.combine_rewards import group_sampling_disabled_reason
from app.core.errors import ERROR_RESPONSES
from app.core.http import RowView, json_body
from app.core.pagination import Page
from app.core.settings import Settings
from app.models import AuditAction, Origin, Policy, Rollout, RolloutPlan
from app.policies.context import OperatedPolicyDep, PolicyContext, Reason, ReasonBody, ViewedPolicyDep
from app.policies.service import audit_policy, reset_override
from app.projects.idempotency import IdempotentRoute
from app.training import rollouts
from app.training.policy_config import effective_rewards, effective_rollouts, parse_rollouts
from app.training.rollouts import PlanRequest, RolloutCounts

router = APIRouter(
    prefix="/v1/policies/{name}/rollouts", tags=["rollouts"], route_class=IdempotentRoute, responses=ERROR_RESPONSES
)
PlanId = Annotated[str, Path(min_length=1, max_length=48)]
PlanStates = Literal["running", "paused", "done", "failed", "cancelled"]


class RolloutCountsView(RowView):
    open: int
    done: int
    skipped: int
    failed: int
    tokens: int = Field(description="of the replies; for running rollouts their budget")
    seconds: float = Field(description="sum of the rollouts' durations")


class PlanView(RowView):
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


@router.get("")
async def get_rollouts(context: ViewedPolicyDep) -> RolloutsView:
    """Return the settings, and how many rollouts there were and what they cost."""
    async with context.read() as (session, policy):
        return await _view_rollouts(session, policy, context.settings)


@router.put("")
async def put_rollouts(
    context: OperatedPolicyDep, body: Annotated[dict[str, Any], json_body(RolloutsConfig, parse=dict)]
) -> RolloutsView:
    """Set the policy's own settings, for replies that end from now on."""
    config = parse_rollouts(body, context.settings)
    async with context.write() as (session, policy):
        policy.rollouts = config.model_dump(mode="json")
        details = config.group_sampling.model_dump(include={"extra_replies", "tokens_per_hour"})
        audit_policy(session, policy, AuditAction.ROLLOUTS_UPDATED, context.actor, **details)
        return await _view_rollouts(session, policy, context.settings)


@router.delete("")
async def reset_rollouts(context: OperatedPolicyDep) -> RolloutsView:
    """Return to the deployment's settings."""
    async with context.write() as locked:
        await reset_override(locked, "rollouts", actor=context.actor)
        return await _view_rollouts(*locked, context.settings)


@router.post("/plans", status_code=201)
async def create_plan(context: OperatedPolicyDep, body: Annotated[PlanRequest, json_body(PlanRequest)]) -> PlanView:
    """Let the serving version answer every prompt of a dataset `n` times, and train on the verifier's rewards."""
    async with context.write() as (session, policy):
        plan = await rollouts.create_plan(session, policy, body, context.settings, actor=context.actor)
        return _view_plan(policy, plan, RolloutCounts())


@router.get("/plans")
async def list_plans(
    context: ViewedPolicyDep,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    after: Annotated[str | None, Query(min_length=1, max_length=48, description="a plan's id")] = None,
) -> PlanPage:
    """Return the policy's plans, the newest first."""
    async with context.read() as (session, policy):
        rows = await rollouts.list_plans(session, policy.id, after, limit)
        counts = await rollouts.count_by_plan(session, [row.id for row in rows])
    return PlanPage.from_rows([_view_plan(policy, row, counts.get(row.id, RolloutCounts())) for row in rows], limit)


@router.get("/plans/{plan_id}")
async def get_plan(context: ViewedPolicyDep, plan_id: PlanId) -> PlanView:
    async with context.read() as (session, policy):
        plan = await rollouts.get_plan(session, policy.id, plan_id)
        counts = await rollouts.count_rollouts(session, Rollout.plan_id == plan.id)
    return _view_plan(policy, plan, counts)


@router.post("/plans/{plan_id}/pause")
async def pause_plan(context: OperatedPolicyDep, plan_id: PlanId, body: ReasonBody) -> PlanView:
    """Pause a plan: running rollouts finish, and no others begin until it is resumed."""
    return await _change_state("pause", context, plan_id, body)


@router.post("/plans/{plan_id}/resume")
async def resume_plan(context: OperatedPolicyDep, plan_id: PlanId, body: ReasonBody) -> PlanView:
    return await _change_state("resume", context, plan_id, body)


@router.post("/plans/{plan_id}/cancel")
async def cancel_plan(context: OperatedPolicyDep, plan_id: PlanId, body: ReasonBody) -> PlanView:
    """End a plan. Verified replies are still trained on."""
    return await _change_state("cancel", context, plan_id, body)


async def _change_state(verb: str, context: PolicyContext, plan_id: str, body: Reason) -> PlanView:
    async with context.write() as (session, policy):
        plan = await rollouts.get_plan(session, policy.id, plan_id, lock=True)
        await rollouts.change_plan_state(session, policy, plan, verb, actor=context.actor, reason=body.reason)
        counts = await rollouts.count_rollouts(session, Rollout.plan_id == plan.id)
    return _view_plan(policy, plan, counts)


def _view_plan(policy: Policy, plan: RolloutPlan, counts: RolloutCounts) -> PlanView:
    return PlanView.from_row(
        plan,
        policy=policy.name,
        replies=RolloutCountsView.from_row(counts),
        verified=counts.verified,
        mean_reward=counts.reward / counts.verified if counts.verified else None,
    )


async def _view_rollouts(session: AsyncSession, policy: Policy, settings: Settings) -> RolloutsView:
    config = effective_rollouts(policy, settings)

    async def counts(origin: Origin) -> RolloutCountsView:
        of_policy = Rollout.policy_id == policy.id
        return RolloutCountsView.from_row(await rollouts.count_rollouts(session, of_policy, Rollout.origin == origin))

    return RolloutsView(
        policy=policy.name,
        overridden=policy.rollouts is not None,
        rollouts=config.model_dump(mode="json"),
        disabled_reason=group_sampling_disabled_reason(config.group_sampling, effective_rewards(policy, settings)),
        group_sampling=await counts(Origin.GROUP_SAMPLE),
        shadow_deployments=await counts(Origin.SHADOW),
        prompt_sets=await counts(Origin.PROMPT_SET),
        tokens_last_hour=await rollouts.count_recent_tokens(session, policy.id, Origin.GROUP_SAMPLE),
    )
