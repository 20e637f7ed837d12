"""/v1/policies/{name}/reward-models: what has learned to judge, how well, and which of them is listened to."""

from collections.abc import Awaitable, Callable
from typing import Annotated, Any

from fastapi import APIRouter, Path, Request
from sqlalchemy.ext.asyncio import AsyncSession

from app.core.database import Database
from app.core.errors import DOCUMENTED
from app.core.http import JsonBody, parse_body, request_body_schema
from app.core.services import settings_of
from app.core.settings import Settings
from app.models import Policy, RewardModel, RewardModelState
from app.policies import service as policies
from app.policies.endpoints import PolicyName
from app.projects.auth import AdminCaller, Caller, DatabaseDep
from app.training import service as training_service
from app.training.policy_rewards import rewards_of
from app.training.reward_models import agreement, repository, service
from app.training.reward_models.schemas import FitRequest, RewardModelList, RewardModelView, WithPeople
from app.training.schemas import Reason

router = APIRouter(prefix="/v1/policies/{name}/reward-models", tags=["reward models"], responses=DOCUMENTED)
Number = Annotated[int, Path(ge=1, le=999_999_999)]


@router.get("")
async def list_reward_models(
    name: PolicyName, request: Request, caller: AdminCaller, db: DatabaseDep
) -> RewardModelList:
    async with db.read() as session:
        policy = await policies.named(session, caller.project_id, name)
        rows = await repository.models_of(session, policy.id)
        serving = next((row for row in rows if row.state == RewardModelState.SERVING), None)
        people = await _with_people(session, policy, serving, settings_of(request))
    return RewardModelList(
        policy=policy.name,
        serving=service.label(policy, serving) if serving else None,
        people=people,
        data=[RewardModelView.of(policy, row) for row in rows],
    )


@router.post("", status_code=202, openapi_extra=request_body_schema(FitRequest))
async def fit_reward_model(
    name: PolicyName, request: Request, caller: AdminCaller, db: DatabaseDep, body: JsonBody
) -> RewardModelView:
    """Fitted by the trainer, between two batches, from what people have said until then."""
    asked = parse_body(FitRequest, body)
    async with db.write() as session:
        policy = await training_service.locked(session, caller.project_id, name)
        service.source_of(policy, settings_of(request))
        row = await service.open_fit(session, policy, actor=caller.key_prefix, reason=asked.reason, serves=asked.serve)
        await session.refresh(row)
        return RewardModelView.of(policy, row)


@router.post("/{number}/serve", openapi_extra=request_body_schema(Reason))
async def serve_reward_model(
    name: PolicyName, number: Number, caller: AdminCaller, db: DatabaseDep, body: JsonBody
) -> RewardModelView:
    """Its word counts from now on; the one that served is retired."""
    return await _move(service.serve, name, number, caller, db, body)


@router.post("/{number}/disable", openapi_extra=request_body_schema(Reason))
async def disable_reward_model(
    name: PolicyName, number: Number, caller: AdminCaller, db: DatabaseDep, body: JsonBody
) -> RewardModelView:
    """It is not asked any more. None is fitted by itself until somebody lets one serve, or asks for a fit."""
    return await _move(service.disable, name, number, caller, db, body)


async def _move(
    move: Callable[..., Awaitable[None]], name: str, number: int, caller: Caller, db: Database, body: dict[str, Any]
) -> RewardModelView:
    asked = parse_body(Reason, body)
    async with db.write() as session:
        policy = await training_service.locked(session, caller.project_id, name)
        row = await service.found(session, policy, number)
        await move(session, policy, row, actor=caller.key_prefix, reason=asked.reason)
        await session.flush()
        await session.refresh(row)
        return RewardModelView.of(policy, row)


async def _with_people(
    session: AsyncSession, policy: Policy, row: RewardModel | None, settings: Settings
) -> WithPeople | None:
    source = rewards_of(policy, settings).learned
    if row is None or source is None:
        return None
    counted = await agreement.measured(session, policy, row)
    return WithPeople(
        words=counted.words, agreement=counted.share, at_most=counted.at_most, min_agreement=source.min_agreement
    )
