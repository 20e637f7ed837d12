"""/v1/policies/{name}/reward-models: reward models, their quality, and which one serves."""

from collections.abc import Awaitable, Callable
from typing import Annotated

from fastapi import APIRouter, Path, Request
from sqlalchemy.ext.asyncio import AsyncSession

from app.core.database import Database
from app.core.errors import ERROR_RESPONSES
from app.core.http import json_body
from app.core.services import settings_of
from app.core.settings import Settings
from app.models import Policy, RewardModel, RewardModelState
from app.policies import service as policies
from app.policies.references import PolicyName
from app.projects.auth import AdminCaller, Caller, DatabaseDep
from app.training import service as training_service
from app.training.reward_config import effective_rewards
from app.training.reward_models import human_labels, repository, service
from app.training.reward_models.schemas import FitRequest, HumanAgreement, RewardModelList, RewardModelView
from app.training.schemas import Reason, ReasonBody

router = APIRouter(prefix="/v1/policies/{name}/reward-models", tags=["reward models"], responses=ERROR_RESPONSES)
Number = Annotated[int, Path(ge=1, le=999_999_999)]


@router.get("")
async def list_reward_models(
    name: PolicyName, request: Request, caller: AdminCaller, db: DatabaseDep
) -> RewardModelList:
    """Return the reward models, the newest first, and how well the one that serves agrees with people."""
    async with db.read() as session:
        policy = await policies.get_policy(session, caller.project_id, name)
        rows = await repository.list_reward_models(session, policy.id)
        serving = next((row for row in rows if row.state == RewardModelState.SERVING), None)
        agreement = await _human_agreement(session, policy, serving, settings_of(request))
    return RewardModelList(
        policy=policy.name,
        serving=repository.reward_model_name(policy, serving) if serving else None,
        human_agreement=agreement,
        data=[RewardModelView.of(policy, row) for row in rows],
    )


@router.post("", status_code=202)
async def fit_reward_model(
    name: PolicyName,
    request: Request,
    caller: AdminCaller,
    db: DatabaseDep,
    body: Annotated[FitRequest, json_body(FitRequest)],
) -> RewardModelView:
    """Request a fit on the feedback so far. The trainer runs it between two batches."""
    async with db.write() as session:
        policy = await training_service.lock_policy(session, caller.project_id, name)
        service.get_learned_source(policy, settings_of(request))
        row = await service.create_fit(
            session, policy, actor=caller.key_prefix, reason=body.reason, serve_when_fitted=body.serve
        )
        await session.refresh(row)
        return RewardModelView.of(policy, row)


@router.post("/{number}/serve")
async def serve_reward_model(
    name: PolicyName, number: Number, caller: AdminCaller, db: DatabaseDep, body: ReasonBody
) -> RewardModelView:
    """Let the reward model serve from now on; the one that served is retired."""
    return await _change_state(service.serve, name, number, caller, db, body)


@router.post("/{number}/disable")
async def disable_reward_model(
    name: PolicyName, number: Number, caller: AdminCaller, db: DatabaseDep, body: ReasonBody
) -> RewardModelView:
    """Stop using the reward model. No other serves or is fitted until an operator serves one or requests a fit."""
    return await _change_state(service.disable, name, number, caller, db, body)


async def _change_state(
    change: Callable[..., Awaitable[None]], name: str, number: int, caller: Caller, db: Database, body: Reason
) -> RewardModelView:
    async with db.write() as session:
        policy = await training_service.lock_policy(session, caller.project_id, name)
        row = await service.get_reward_model(session, policy, number)
        await change(session, policy, row, actor=caller.key_prefix, reason=body.reason)
        await session.flush()
        await session.refresh(row)
        return RewardModelView.of(policy, row)


async def _human_agreement(
    session: AsyncSession, policy: Policy, row: RewardModel | None, settings: Settings
) -> HumanAgreement | None:
    source = effective_rewards(policy, settings).learned
    if row is None or source is None:
        return None
    agreement = await human_labels.measure_agreement(session, policy, row)
    return HumanAgreement(
        labels=agreement.total,
        agreement=agreement.rate,
        upper_bound=agreement.upper_bound,
        min_agreement=source.min_agreement,
    )
