"""/v1/policies/{name}/rollouts: what the learner asks for itself, and plans over sets of prompts."""

from typing import Annotated, Any

from fastapi import APIRouter, Path, Query, Request
from sqlalchemy.ext.asyncio import AsyncSession

from alignment.config.rollouts import RolloutsConfig, idle
from app.core.database import Database
from app.core.errors import DOCUMENTED
from app.core.http import JsonBody, parse_body, request_body_schema
from app.core.services import settings_of
from app.core.settings import Settings
from app.models import Origin, Policy, Rollout, record_audit
from app.policies import overrides
from app.policies import service as policies
from app.policies.endpoints import PolicyName
from app.projects.auth import AdminCaller, Caller, DatabaseDep
from app.training import service as training_service
from app.training.policy_rewards import rewards_of
from app.training.rollouts import repository, service
from app.training.rollouts.config import rollouts_of
from app.training.rollouts.schemas import PlanPage, PlanRequest, PlanView, RolloutsView, TallyView
from app.training.schemas import Reason

router = APIRouter(prefix="/v1/policies/{name}/rollouts", tags=["rollouts"], responses=DOCUMENTED)
PlanId = Annotated[str, Path(min_length=1, max_length=48)]


@router.get("")
async def get_rollouts(name: PolicyName, request: Request, caller: AdminCaller, db: DatabaseDep) -> RolloutsView:
    """The settings, how many there were, and what they cost."""
    async with db.read() as session:
        policy = await policies.named(session, caller.project_id, name)
        return await _view(session, policy, settings_of(request))


@router.put("", openapi_extra=request_body_schema(RolloutsConfig))
async def put_rollouts(
    name: PolicyName, request: Request, caller: AdminCaller, db: DatabaseDep, body: JsonBody
) -> RolloutsView:
    """For replies that end from now on."""
    config = service.read(body, settings_of(request))
    async with db.write() as session:
        policy = await training_service.locked(session, caller.project_id, name)
        policy.rollouts = config.model_dump(mode="json")
        await session.flush()
        told: dict[str, Any] = {
            "extra_replies": config.group_sampling.extra_replies,
            "tokens_per_hour": config.group_sampling.tokens_per_hour,
        }
        record_audit(session, caller.key_prefix, "set rollouts", policy.name, project_id=policy.project_id, **told)
        return await _view(session, policy, settings_of(request))


@router.delete("")
async def reset_rollouts(name: PolicyName, request: Request, caller: AdminCaller, db: DatabaseDep) -> RolloutsView:
    """The deployment's again."""
    async with db.write() as session:
        policy = await training_service.locked(session, caller.project_id, name)
        await overrides.reset(session, policy, "rollouts", actor=caller.key_prefix)
        return await _view(session, policy, settings_of(request))


@router.post("/plans", status_code=201, openapi_extra=request_body_schema(PlanRequest))
async def create_plan(
    name: PolicyName, request: Request, caller: AdminCaller, db: DatabaseDep, body: JsonBody
) -> PlanView:
    """Ask the serving version every prompt of a dataset, `n` times, and learn from what the verifier says."""
    asked = parse_body(PlanRequest, body)
    async with db.write() as session:
        policy = await policies.named(session, caller.project_id, name)
        plan = await service.create(session, policy, asked, settings_of(request), actor=caller.key_prefix)
        return PlanView.of(policy.name, plan, repository.Tally())


@router.get("/plans")
async def list_plans(
    name: PolicyName,
    caller: AdminCaller,
    db: DatabaseDep,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    after: Annotated[str | None, Query(min_length=1, max_length=48, description="a plan's id")] = None,
) -> PlanPage:
    """The newest first."""
    async with db.read() as session:
        policy = await policies.named(session, caller.project_id, name)
        rows = await repository.plans(session, policy.id, after, limit)
        tallies = await repository.of_plans(session, [row.id for row in rows])
    views = [PlanView.of(policy.name, row, tallies.get(row.id, repository.Tally())) for row in rows]
    return PlanPage.cut(views, limit)


@router.get("/plans/{plan_id}")
async def get_plan(name: PolicyName, plan_id: PlanId, caller: AdminCaller, db: DatabaseDep) -> PlanView:
    async with db.read() as session:
        policy = await policies.named(session, caller.project_id, name)
        plan = await repository.plan(session, policy.id, plan_id)
        tally = await repository.tally(session, Rollout.plan_id == plan.id)
    return PlanView.of(policy.name, plan, tally)


@router.post("/plans/{plan_id}/pause", openapi_extra=request_body_schema(Reason))
async def pause_plan(
    name: PolicyName, plan_id: PlanId, caller: AdminCaller, db: DatabaseDep, body: JsonBody
) -> PlanView:
    """What has been asked is finished; nothing more is asked until somebody resumes it."""
    return await _step("pause", name, plan_id, caller, db, body)


@router.post("/plans/{plan_id}/resume", openapi_extra=request_body_schema(Reason))
async def resume_plan(
    name: PolicyName, plan_id: PlanId, caller: AdminCaller, db: DatabaseDep, body: JsonBody
) -> PlanView:
    return await _step("resume", name, plan_id, caller, db, body)


@router.post("/plans/{plan_id}/cancel", openapi_extra=request_body_schema(Reason))
async def cancel_plan(
    name: PolicyName, plan_id: PlanId, caller: AdminCaller, db: DatabaseDep, body: JsonBody
) -> PlanView:
    """For good. What has been verified is still learned from."""
    return await _step("cancel", name, plan_id, caller, db, body)


async def _step(verb: str, name: str, plan_id: str, caller: Caller, db: Database, body: dict[str, object]) -> PlanView:
    asked = parse_body(Reason, body)
    async with db.write() as session:
        policy = await policies.named(session, caller.project_id, name)
        plan = await repository.plan(session, policy.id, plan_id, lock=True)
        await service.step(session, policy, plan, verb, actor=caller.key_prefix, reason=asked.reason)
        tally = await repository.tally(session, Rollout.plan_id == plan.id)
    return PlanView.of(policy.name, plan, tally)


async def _view(session: AsyncSession, policy: Policy, settings: Settings) -> RolloutsView:
    config = rollouts_of(policy, settings)
    mine = Rollout.policy_id == policy.id
    return RolloutsView(
        policy=policy.name,
        own=policy.rollouts is not None,
        rollouts=config.model_dump(mode="json"),
        idle=idle(config.group_sampling, rewards_of(policy, settings)),
        group_sampling=TallyView.of(await repository.tally(session, mine, Rollout.origin == Origin.GROUP_SAMPLE)),
        shadow_deployments=TallyView.of(await repository.tally(session, mine, Rollout.origin == Origin.SHADOW)),
        prompt_sets=TallyView.of(await repository.tally(session, mine, Rollout.origin == Origin.PROMPT_SET)),
        tokens_last_hour=await repository.spent(session, policy.id, Origin.GROUP_SAMPLE),
    )
