"""/v1/policies/{name}/training, /updates and /rewards: the state of learning, its control, and the rewards."""

from typing import Annotated, Any

from fastapi import APIRouter, Query

from alignment.config.rewards import RewardsConfig
from app.core.errors import ERROR_RESPONSES
from app.core.http import json_body
from app.models import AuditAction
from app.policies.context import OperatedPolicyDep, PolicyContext, PolicyDep, Reason, ReasonBody, ViewedPolicyDep
from app.policies.overrides import effective_settings
from app.policies.service import audit_policy, reset_override
from app.projects.idempotency import IdempotentRoute
from app.training import kl_guard, service
from app.training.kl_guard import Control
from app.training.policy_config import parse_rewards
from app.training.views import RewardsView, TrainingView, UpdatePage, view_rewards, view_training, view_updates

router = APIRouter(
    prefix="/v1/policies/{name}", tags=["training"], route_class=IdempotentRoute, responses=ERROR_RESPONSES
)


@router.get("/training")
async def get_training(context: ViewedPolicyDep) -> TrainingView:
    """Return the mode of learning, the samples that wait, and what the next batch waits for."""
    return await _view(context)


@router.post("/training/pause")
async def pause(context: OperatedPolicyDep, body: ReasonBody) -> TrainingView:
    """Halt learning: the current update finishes, and no batch is assembled until it is resumed."""
    return await _control(kl_guard.halt, context, body)


@router.post("/training/resume")
async def resume(context: OperatedPolicyDep, body: ReasonBody) -> TrainingView:
    """Return to the asynchronous mode and reset the alarms of the KL guard."""
    return await _control(kl_guard.resume, context, body)


@router.post("/training/trigger")
async def trigger(context: OperatedPolicyDep, body: ReasonBody) -> TrainingView:
    """Let two ready samples be enough for the next batch."""
    return await _control(service.trigger, context, body)


@router.get("/updates")
async def list_updates(
    context: ViewedPolicyDep,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    after: Annotated[str | None, Query(min_length=1, max_length=48, description="an update's id")] = None,
) -> UpdatePage:
    """Return every batch with the metrics of its update, the newest first."""
    async with context.read() as (session, policy):
        return await view_updates(session, policy, limit, after)


@router.get("/rewards")
async def get_rewards(context: ViewedPolicyDep) -> RewardsView:
    """Return the policy's own rewards, or the deployment's."""
    async with context.read() as (_, policy):
        return view_rewards(policy, context.settings)


@router.put("/rewards")
async def put_rewards(
    context: PolicyDep, body: Annotated[dict[str, Any], json_body(RewardsConfig, parse=dict)]
) -> RewardsView:
    """Set the policy's own rewards. Rewards that were computed before stay until their turn is processed again."""
    async with context.write() as locked:
        session, policy = locked
        config = parse_rewards(body, context.settings, effective_settings(policy, context.settings).algorithm)
        policy.rewards = config.model_dump(mode="json")
        sources = [source.name for source in config.sources]
        audit_policy(session, policy, AuditAction.REWARDS_UPDATED, context.actor, sources=sources)
    return view_rewards(policy, context.settings)


@router.delete("/rewards")
async def reset_rewards(context: PolicyDep) -> RewardsView:
    """Return to the deployment's rewards."""
    async with context.write() as locked:
        await reset_override(locked, "rewards", actor=context.actor)
    return view_rewards(locked.policy, context.settings)


async def _control(act: Control, context: PolicyContext, body: Reason) -> TrainingView:
    async with context.write() as locked:
        act(locked, actor=context.actor, reason=body.reason)
    return await _view(context)


async def _view(context: PolicyContext) -> TrainingView:
    """Return the state of learning as it is now. After an act it is read when the policy is no longer locked."""
    async with context.read() as (session, policy):
        return await view_training(session, policy, context.settings)
