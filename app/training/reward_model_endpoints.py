"""/v1/policies/{name}/reward-models: reward models, their quality, and which one serves."""

from typing import Annotated, Any, Literal, Protocol

from fastapi import APIRouter, Path
from pydantic import BaseModel, Field
from sqlalchemy.ext.asyncio import AsyncSession

from app.core.errors import ERROR_RESPONSES
from app.core.http import RowView, json_body
from app.core.settings import Settings
from app.models import Policy, RewardModel, RewardModelState
from app.policies.context import OperatedPolicyDep, PolicyContext, Reason, ReasonBody, ViewedPolicyDep
from app.policies.locks import LockedPolicy
from app.projects.idempotency import IdempotentRoute
from app.training import human_labels, reward_models
from app.training.policy_config import effective_rewards, get_reward_model_source
from app.training.reward_models import reward_model_name

router = APIRouter(
    prefix="/v1/policies/{name}/reward-models",
    tags=["reward models"],
    route_class=IdempotentRoute,
    responses=ERROR_RESPONSES,
)
Number = Annotated[int, Path(ge=1, le=999_999_999)]


class FitRequest(Reason):
    serve: bool = Field(True, description="whether it serves once it is fitted, if it is good enough")


class RewardModelView(RowView):
    object: Literal["reward_model"] = "reward_model"
    id: str
    name: str = Field(description='such as "assistant/rm-3"')
    number: int
    state: Literal["open", "trained", "serving", "disabled", "retired", "refused", "failed"]
    actor: str = Field(description="who brought it into this state")
    reason: str | None
    metrics: dict[str, Any] = Field(description="measured on held-out labels")
    pairs: int | None
    binary_labels: int | None
    raters: int | None
    attempt: int
    manifest_sha256: str | None
    created_at: float
    settled_at: float | None
    served_at: float | None
    tainted_at: float | None = Field(
        description="when data that it learned from was erased; it cannot serve from then on"
    )


class HumanAgreement(BaseModel):
    """How well the reward model that serves agrees with the feedback that people gave since."""

    labels: int = Field(description="people's latest labels of replies that it had scored; at least 30 are needed")
    agreement: float | None
    auc: float | None = Field(description="the probability that a liked reply has a higher score than a disliked one")
    auc_low: float = Field(description="its lower bound (95 %): 0.5 or less disables the model, after 30 labels")
    min_agreement: float = Field(description="what the lower bound at a fit must exceed")


class RewardModelList(BaseModel):
    object: Literal["list"] = "list"
    policy: str
    serving: str | None
    human_agreement: HumanAgreement | None = Field(description="null when no reward model serves")
    data: list[RewardModelView] = Field(description="the newest first")


@router.get("")
async def list_reward_models(context: ViewedPolicyDep) -> RewardModelList:
    """Return the reward models, the newest first, and how well the one that serves agrees with people."""
    async with context.read() as (session, policy):
        rows = await reward_models.list_reward_models(session, policy.id)
        serving = next((row for row in rows if row.state == RewardModelState.SERVING), None)
        agreement = await _human_agreement(session, policy, serving, context.settings)
    return RewardModelList(
        policy=policy.name,
        serving=reward_model_name(policy, serving) if serving else None,
        human_agreement=agreement,
        data=[_view(policy, row) for row in rows],
    )


@router.post("", status_code=202)
async def fit_reward_model(
    context: OperatedPolicyDep, body: Annotated[FitRequest, json_body(FitRequest)]
) -> RewardModelView:
    """Request a fit on the feedback so far. The trainer runs it between two batches."""
    async with context.write() as locked:
        get_reward_model_source(locked.policy, context.settings)
        row = await reward_models.create_fit(
            locked, actor=context.actor, reason=body.reason, serve_when_fitted=body.serve
        )
        await locked.session.refresh(row)
        return _view(locked.policy, row)


@router.post("/{number}/serve")
async def serve_reward_model(context: OperatedPolicyDep, number: Number, body: ReasonBody) -> RewardModelView:
    """Let the reward model serve from now on; the one that served is retired."""
    return await _change_state(reward_models.serve, context, number, body)


@router.post("/{number}/disable")
async def disable_reward_model(context: OperatedPolicyDep, number: Number, body: ReasonBody) -> RewardModelView:
    """Stop using the reward model. No other serves or is fitted until an operator serves one or requests a fit."""
    return await _change_state(reward_models.disable, context, number, body)


class Change(Protocol):
    """An act on a reward model: `reward_models.serve` or `disable`."""

    async def __call__(self, locked: LockedPolicy, row: RewardModel, *, actor: str, reason: str | None) -> None: ...


async def _change_state(change: Change, context: PolicyContext, number: int, body: Reason) -> RewardModelView:
    async with context.write() as locked:
        session, policy = locked
        row = await reward_models.get_reward_model(session, policy, number)
        await change(locked, row, actor=context.actor, reason=body.reason)
        await session.flush()
        await session.refresh(row)
        return _view(policy, row)


def _view(policy: Policy, row: RewardModel) -> RewardModelView:
    return RewardModelView.from_row(
        row,
        name=reward_model_name(policy, row),
        pairs=row.num_pairs,
        binary_labels=row.num_thumbs,
        raters=row.num_raters,
    )


async def _human_agreement(
    session: AsyncSession, policy: Policy, row: RewardModel | None, settings: Settings
) -> HumanAgreement | None:
    source = effective_rewards(policy, settings).reward_model
    if row is None or source is None:
        return None
    measured = await human_labels.measure_agreement(session, policy, row)
    return HumanAgreement(
        labels=measured.agreement.total,
        agreement=measured.agreement.rate,
        auc=measured.evidence.auc,
        auc_low=measured.evidence.bounds().low,
        min_agreement=source.min_agreement,
    )
