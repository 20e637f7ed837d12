"""/v1/policies/{name}/rollouts: rollout settings and statistics, and plans over prompt sets."""

from typing import Annotated, Any

from fastapi import APIRouter, Path, Query, Request
from sqlalchemy.ext.asyncio import AsyncSession

from alignment.config.rollouts import RolloutsConfig
from alignment.signals.eligibility import group_sampling_disabled_reason
from app.core.database import Database
from app.core.errors import ERROR_RESPONSES
from app.core.http import json_body
from app.core.services import settings_of
from app.core.settings import Settings
from app.models import AuditAction, Origin, Policy, Rollout, record_audit
from app.policies import overrides
from app.policies import service as policies
from app.policies.references import PolicyName
from app.projects.auth import AdminCaller, Caller, DatabaseDep
from app.training import service as training_service
from app.training.reward_config import effective_rewards
from app.training.rollouts import config as rollouts_config
from app.training.rollouts import repository, service
from app.training.rollouts.config import effective_rollouts
from app.training.rollouts.schemas import PlanPage, PlanRequest, PlanView, RolloutCountsView, RolloutsView
from app.training.schemas import Reason, ReasonBody

router = APIRouter(prefix="/v1/policies/{name}/rollouts", tags=["rollouts"], responses=ERROR_RESPONSES)
PlanId = Annotated[str, Path(min_length=1, max_length=48)]


@router.get("")
async def get_rollouts(name: PolicyName, request: Request, caller: AdminCaller, db: DatabaseDep) -> RolloutsView:
    """Return the settings, and how many rollouts there were and what they cost."""
    async with db.read() as session:
        policy = await policies.get_policy(session, caller.project_id, name)
        return await _view(session, policy, settings_of(request))


@router.put("")
async def put_rollouts(
    name: PolicyName,
    request: Request,
    caller: AdminCaller,
    db: DatabaseDep,
    body: Annotated[dict[str, Any], json_body(RolloutsConfig, parse=dict)],
) -> RolloutsView:
    """Set the policy's own settings, for replies that end from now on."""
    config = rollouts_config.parse_rollouts(body, settings_of(request))
    async with db.write() as session:
        policy = await training_service.lock_policy(session, caller.project_id, name)
        policy.rollouts = config.model_dump(mode="json")
        await session.flush()
        details: dict[str, Any] = {
            "extra_replies": config.group_sampling.extra_replies,
            "tokens_per_hour": config.group_sampling.tokens_per_hour,
        }
        record_audit(
            session,
            caller.key_prefix,
            AuditAction.ROLLOUTS_UPDATED,
            policy.name,
            project_id=policy.project_id,
            **details,
        )
        return await _view(session, policy, settings_of(request))


@router.delete("")
async def reset_rollouts(name: PolicyName, request: Request, caller: AdminCaller, db: DatabaseDep) -> RolloutsView:
    """Return to the deployment's settings."""
    async with db.write() as session:
        policy = await training_service.lock_policy(session, caller.project_id, name)
        await overrides.reset_override(session, policy, "rollouts", actor=caller.key_prefix)
        return await _view(session, policy, settings_of(request))


@router.post("/plans", status_code=201)
async def create_plan(
    name: PolicyName,
    request: Request,
    caller: AdminCaller,
    db: DatabaseDep,
    body: Annotated[PlanRequest, json_body(PlanRequest)],
) -> PlanView:
    """Let the serving version answer every prompt of a dataset `n` times, and train on the verifier's rewards."""
    async with db.write() as session:
        policy = await policies.get_policy(session, caller.project_id, name)
        plan = await service.create_plan(session, policy, body, settings_of(request), actor=caller.key_prefix)
        return PlanView.of(policy.name, plan, repository.RolloutCounts())


@router.get("/plans")
async def list_plans(
    name: PolicyName,
    caller: AdminCaller,
    db: DatabaseDep,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    after: Annotated[str | None, Query(min_length=1, max_length=48, description="a plan's id")] = None,
) -> PlanPage:
    """Return the policy's plans, the newest first."""
    async with db.read() as session:
        policy = await policies.get_policy(session, caller.project_id, name)
        rows = await repository.list_plans(session, policy.id, after, limit)
        counts = await repository.count_by_plan(session, [row.id for row in rows])
    views = [PlanView.of(policy.name, row, counts.get(row.id, repository.RolloutCounts())) for row in rows]
    return PlanPage.from_rows(views, limit)


@router.get("/plans/{plan_id}")
async def get_plan(name: PolicyName, plan_id: PlanId, caller: AdminCaller, db: DatabaseDep) -> PlanView:
    async with db.read() as session:
        policy = await policies.get_policy(session, caller.project_id, name)
        plan = await repository.get_plan(session, policy.id, plan_id)
        counts = await repository.count_rollouts(session, Rollout.plan_id == plan.id)
    return PlanView.of(policy.name, plan, counts)


@router.post("/plans/{plan_id}/pause")
async def pause_plan(
    name: PolicyName, plan_id: PlanId, caller: AdminCaller, db: DatabaseDep, body: ReasonBody
) -> PlanView:
    """Pause a plan: running rollouts finish, and no others begin until it is resumed."""
    return await _change_state("pause", name, plan_id, caller, db, body)


@router.post("/plans/{plan_id}/resume")
async def resume_plan(
    name: PolicyName, plan_id: PlanId, caller: AdminCaller, db: DatabaseDep, body: ReasonBody
) -> PlanView:
    return await _change_state("resume", name, plan_id, caller, db, body)


@router.post("/plans/{plan_id}/cancel")
async def cancel_plan(
    name: PolicyName, plan_id: PlanId, caller: AdminCaller, db: DatabaseDep, body: ReasonBody
) -> PlanView:
    """End a plan. Verified replies are still trained on."""
    return await _change_state("cancel", name, plan_id, caller, db, body)


async def _change_state(verb: str, name: str, plan_id: str, caller: Caller, db: Database, body: Reason) -> PlanView:
    async with db.write() as session:
        policy = await policies.get_policy(session, caller.project_id, name)
        plan = await repository.get_plan(session, policy.id, plan_id, lock=True)
        await service.change_plan_state(session, policy, plan, verb, actor=caller.key_prefix, reason=body.reason)
        counts = await repository.count_rollouts(session, Rollout.plan_id == plan.id)
    return PlanView.of(policy.name, plan, counts)


async def _view(session: AsyncSession, policy: Policy, settings: Settings) -> RolloutsView:
    config = effective_rollouts(policy, settings)

    async def counts(origin: Origin) -> RolloutCountsView:
        rows = await repository.count_rollouts(session, Rollout.policy_id == policy.id, Rollout.origin == origin)
        return RolloutCountsView.of(rows)

    return RolloutsView(
        policy=policy.name,
        overridden=policy.rollouts is not None,
        rollouts=config.model_dump(mode="json"),
        disabled_reason=group_sampling_disabled_reason(config.group_sampling, effective_rewards(policy, settings)),
        group_sampling=await counts(Origin.GROUP_SAMPLE),
        shadow_deployments=await counts(Origin.SHADOW),
        prompt_sets=await counts(Origin.PROMPT_SET),
        tokens_last_hour=await repository.count_recent_tokens(session, policy.id, Origin.GROUP_SAMPLE),
    )
