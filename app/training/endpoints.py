"""/v1/policies/{name}/training, /updates and /rewards: how it learns, and from what."""

from collections.abc import Awaitable, Callable
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from sqlalchemy.ext.asyncio import AsyncSession

from alignment.config.rewards import RewardsConfig
from app.core.database import Database
from app.core.errors import DOCUMENTED
from app.core.http import JsonBody, parse_body, request_body_schema
from app.core.services import settings_of
from app.core.settings import Settings
from app.models import Batch, Policy, record_audit
from app.policies import overrides, service
from app.policies.endpoints import PolicyName
from app.projects.auth import AdminCaller, Caller, DatabaseDep
from app.training import kl_guard, reward_config
from app.training import service as training_service
from app.training.policy_rewards import rewards_of
from app.training.schemas import Reason, RewardsView, TrainingView, UpdatePage, UpdateView

router = APIRouter(prefix="/v1/policies/{name}", tags=["training"], responses=DOCUMENTED)
LAST = 5  # batches that are shown with the rest


@router.get("/training")
async def get_training(name: PolicyName, request: Request, caller: AdminCaller, db: DatabaseDep) -> TrainingView:
    return await _training(db, caller, name, settings_of(request))


@router.post("/training/pause", openapi_extra=request_body_schema(Reason))
async def pause(
    name: PolicyName, request: Request, caller: AdminCaller, db: DatabaseDep, body: JsonBody
) -> TrainingView:
    """What is under way is finished; nothing more is assembled until somebody resumes it."""
    return await _steer(kl_guard.halt, name, request, caller, db, body)


@router.post("/training/resume", openapi_extra=request_body_schema(Reason))
async def resume(
    name: PolicyName, request: Request, caller: AdminCaller, db: DatabaseDep, body: JsonBody
) -> TrainingView:
    """Asynchronous again, with the guard's alarms forgotten."""
    return await _steer(kl_guard.resume, name, request, caller, db, body)


@router.post("/training/trigger", openapi_extra=request_body_schema(Reason))
async def trigger(
    name: PolicyName, request: Request, caller: AdminCaller, db: DatabaseDep, body: JsonBody
) -> TrainingView:
    """The next batch need not be full: two ripe samples are enough."""
    return await _steer(training_service.trigger, name, request, caller, db, body)


@router.get("/updates")
async def list_updates(
    name: PolicyName,
    caller: AdminCaller,
    db: DatabaseDep,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    after: Annotated[str | None, Query(min_length=1, max_length=48, description="an update's id")] = None,
) -> UpdatePage:
    """Every batch, the newest first, with what the update measured."""
    async with db.read() as session:
        policy = await service.named(session, caller.project_id, name)
        rows = await training_service.updates(session, policy, after, limit)
        return UpdatePage.cut(await _views(session, policy, rows), limit)


@router.get("/rewards")
async def get_rewards(name: PolicyName, request: Request, caller: AdminCaller, db: DatabaseDep) -> RewardsView:
    async with db.read() as session:
        policy = await service.named(session, caller.project_id, name)
    return _rewards(policy, settings_of(request))


@router.put("/rewards", openapi_extra=request_body_schema(RewardsConfig))
async def put_rewards(
    name: PolicyName, request: Request, caller: AdminCaller, db: DatabaseDep, body: JsonBody
) -> RewardsView:
    """From now on; what has been judged before keeps its worth until it is judged anew."""
    config = reward_config.read(body, settings_of(request))
    async with db.write() as session:
        policy = await training_service.locked(session, caller.project_id, name)
        policy.rewards = config.model_dump(mode="json")
        sources = [source.name for source in config.sources]
        record_audit(
            session, caller.key_prefix, "set rewards", policy.name, project_id=policy.project_id, sources=sources
        )
    return _rewards(policy, settings_of(request))


@router.delete("/rewards")
async def reset_rewards(name: PolicyName, request: Request, caller: AdminCaller, db: DatabaseDep) -> RewardsView:
    """The deployment's again."""
    async with db.write() as session:
        policy = await training_service.locked(session, caller.project_id, name)
        await overrides.reset(session, policy, "rewards", actor=caller.key_prefix)
    return _rewards(policy, settings_of(request))


async def _steer(
    move: Callable[..., Awaitable[None]],
    name: str,
    request: Request,
    caller: Caller,
    db: Database,
    body: dict[str, Any],
) -> TrainingView:
    asked = parse_body(Reason, body)
    async with db.write() as session:
        policy = await training_service.locked(session, caller.project_id, name)
        await move(session, policy, actor=caller.key_prefix, reason=asked.reason)
    return await _training(db, caller, name, settings_of(request))


def _rewards(policy: Policy, settings: Settings) -> RewardsView:
    shown = reward_config.shown(rewards_of(policy, settings))
    return RewardsView(policy=policy.name, own=policy.rewards is not None, rewards=shown)


async def _training(db: Database, caller: Caller, name: str, settings: Settings) -> TrainingView:
    async with db.read() as session:
        policy = await service.named(session, caller.project_id, name)
        waits = await training_service.waiting(session, policy, settings)
        rows = await training_service.updates(session, policy, None, LAST)
        views = await _views(session, policy, rows[:LAST])
        triggered = await training_service.triggered(session, policy)
        return TrainingView.of(
            policy,
            waits,
            batch_size=settings.batch_size,
            triggered=triggered,
            missing=await training_service.missing(session, policy, waits, settings, at_once=triggered),
            updates=[view.model_copy(update={"metrics": {}}) for view in views],
        )


async def _views(session: AsyncSession, policy: Policy, rows: list[Batch]) -> list[UpdateView]:
    numbers = await training_service.numbers(session, {id for row in rows for id in (row.parent_id, row.version_id)})
    return [UpdateView.of(policy, row, numbers) for row in rows]
