"""/v1/policies/{name}/training, /updates and /rewards: the state of learning, its control, and the rewards."""

from collections.abc import Awaitable, Callable
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from sqlalchemy.ext.asyncio import AsyncSession

from alignment.config.rewards import RewardsConfig
from app.core.database import Database
from app.core.errors import ERROR_RESPONSES
from app.core.http import json_body
from app.core.services import settings_of
from app.core.settings import Settings
from app.models import AuditAction, Batch, Policy, record_audit
from app.policies import overrides, service
from app.policies.references import PolicyName
from app.projects.auth import AdminCaller, Caller, DatabaseDep
from app.training import kl_guard, reward_config
from app.training import service as training_service
from app.training.reward_config import effective_rewards
from app.training.schemas import Reason, ReasonBody, RewardsView, TrainingView, UpdatePage, UpdateView

router = APIRouter(prefix="/v1/policies/{name}", tags=["training"], responses=ERROR_RESPONSES)
NUM_LATEST_UPDATES = 5  # that the training view shows


@router.get("/training")
async def get_training(name: PolicyName, request: Request, caller: AdminCaller, db: DatabaseDep) -> TrainingView:
    """Return the mode of learning, the samples that wait, and what the next batch waits for."""
    return await _view_training(db, caller, name, settings_of(request))


@router.post("/training/pause")
async def pause(
    name: PolicyName, request: Request, caller: AdminCaller, db: DatabaseDep, body: ReasonBody
) -> TrainingView:
    """Halt learning: the current update finishes, and no batch is assembled until it is resumed."""
    return await _control(kl_guard.halt, name, request, caller, db, body)


@router.post("/training/resume")
async def resume(
    name: PolicyName, request: Request, caller: AdminCaller, db: DatabaseDep, body: ReasonBody
) -> TrainingView:
    """Return to the asynchronous mode and reset the alarms of the KL guard."""
    return await _control(kl_guard.resume, name, request, caller, db, body)


@router.post("/training/trigger")
async def trigger(
    name: PolicyName, request: Request, caller: AdminCaller, db: DatabaseDep, body: ReasonBody
) -> TrainingView:
    """Let two ready samples be enough for the next batch."""
    return await _control(training_service.trigger, name, request, caller, db, body)


@router.get("/updates")
async def list_updates(
    name: PolicyName,
    caller: AdminCaller,
    db: DatabaseDep,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    after: Annotated[str | None, Query(min_length=1, max_length=48, description="an update's id")] = None,
) -> UpdatePage:
    """Return every batch with the metrics of its update, the newest first."""
    async with db.read() as session:
        policy = await service.get_policy(session, caller.project_id, name)
        rows = await training_service.list_batches(session, policy, after, limit)
        return UpdatePage.from_rows(await _view_updates(session, policy, rows), limit)


@router.get("/rewards")
async def get_rewards(name: PolicyName, request: Request, caller: AdminCaller, db: DatabaseDep) -> RewardsView:
    """Return the policy's own rewards, or the deployment's."""
    async with db.read() as session:
        policy = await service.get_policy(session, caller.project_id, name)
    return _view_rewards(policy, settings_of(request))


@router.put("/rewards")
async def put_rewards(
    name: PolicyName,
    request: Request,
    caller: AdminCaller,
    db: DatabaseDep,
    body: Annotated[dict[str, Any], json_body(RewardsConfig, parse=dict)],
) -> RewardsView:
    """Set the policy's own rewards. Rewards that were computed before stay until their turn is processed again."""
    config = reward_config.parse_rewards(body, settings_of(request))
    async with db.write() as session:
        policy = await training_service.lock_policy(session, caller.project_id, name)
        policy.rewards = config.model_dump(mode="json")
        sources = [source.name for source in config.sources]
        record_audit(
            session,
            caller.key_prefix,
            AuditAction.REWARDS_UPDATED,
            policy.name,
            project_id=policy.project_id,
            sources=sources,
        )
    return _view_rewards(policy, settings_of(request))


@router.delete("/rewards")
async def reset_rewards(name: PolicyName, request: Request, caller: AdminCaller, db: DatabaseDep) -> RewardsView:
    """Return to the deployment's rewards."""
    async with db.write() as session:
        policy = await training_service.lock_policy(session, caller.project_id, name)
        await overrides.reset_override(session, policy, "rewards", actor=caller.key_prefix)
    return _view_rewards(policy, settings_of(request))


async def _control(
    action: Callable[..., Awaitable[None]],
    name: str,
    request: Request,
    caller: Caller,
    db: Database,
    body: Reason,
) -> TrainingView:
    async with db.write() as session:
        policy = await training_service.lock_policy(session, caller.project_id, name)
        await action(session, policy, actor=caller.key_prefix, reason=body.reason)
    return await _view_training(db, caller, name, settings_of(request))


def _view_rewards(policy: Policy, settings: Settings) -> RewardsView:
    rewards = reward_config.redact_rewards(effective_rewards(policy, settings))
    return RewardsView(policy=policy.name, overridden=policy.rewards is not None, rewards=rewards)


async def _view_training(db: Database, caller: Caller, name: str, settings: Settings) -> TrainingView:
    async with db.read() as session:
        policy = await service.get_policy(session, caller.project_id, name)
        counts = await training_service.count_samples(session, policy, settings)
        rows = await training_service.list_batches(session, policy, None, NUM_LATEST_UPDATES)
        views = await _view_updates(session, policy, rows[:NUM_LATEST_UPDATES])
        triggered = await training_service.is_triggered(session, policy)
        return TrainingView.of(
            policy,
            counts,
            batch_size=settings.batch_size,
            triggered=triggered,
            waiting_for=await training_service.describe_wait(session, policy, counts, settings, triggered=triggered),
            updates=[view.model_copy(update={"metrics": {}}) for view in views],
        )


async def _view_updates(session: AsyncSession, policy: Policy, rows: list[Batch]) -> list[UpdateView]:
    numbers = await training_service.version_numbers(
        session, {id for row in rows for id in (row.parent_id, row.version_id)}
    )
    return [UpdateView.of(policy, row, numbers) for row in rows]
