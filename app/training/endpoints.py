"""/v1/policies/{name}/training, /updates and /rewards: the state of learning, its control, and the rewards."""

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query
from pydantic import BaseModel, Field
from sqlalchemy.ext.asyncio import AsyncSession

from alignment.config.rewards import RewardsConfig
from app.core.errors import ERROR_RESPONSES
from app.core.http import RowView, json_body
from app.core.pagination import Page
from app.models import AuditAction, Batch, Policy
from app.policies import repository
from app.policies.context import OperatedPolicyDep, PolicyContext, PolicyDep, Reason, ReasonBody, ViewedPolicyDep
from app.policies.overrides import effective_settings
from app.policies.references import format_reference
from app.policies.service import audit_policy, reset_override
from app.projects.idempotency import IdempotentRoute
from app.training import kl_guard, service
from app.training.kl_guard import Control
from app.training.policy_config import effective_rewards, parse_rewards, redact_rewards

router = APIRouter(
    prefix="/v1/policies/{name}", tags=["training"], route_class=IdempotentRoute, responses=ERROR_RESPONSES
)
NUM_LATEST_UPDATES = 5  # that the training view shows


class SamplesView(BaseModel):
    open: int = Field(description="ready for the next batch; at most 10,000 are counted")
    not_ready: int = Field(description="waiting for late feedback; at most 10,000 are counted")
    quarantined: int = Field(description="waiting for an admin's decision")


class UpdateView(RowView):
    """A batch and the result of its update."""

    object: Literal["update"] = "update"
    id: str
    state: str
    reason: str | None
    parent: str = Field(description="the version that the update starts from")
    version: str | None = Field(description="the version that it produced")
    samples: int
    raters: int | None
    attempt: int
    created_at: float
    claimed_at: float | None
    settled_at: float | None
    metrics: dict[str, Any]


class UpdatePage(Page[UpdateView]):
    pass


class TrainingView(RowView):
    object: Literal["training"] = "training"
    policy: str
    mode: Literal["asynchronous", "synchronous", "halted"]
    reason: str | None
    since: float | None = Field(description="when the mode last changed; null if it never did")
    kl_alarms: int = Field(description="alarms of the KL guard in a row")
    samples: SamplesView
    raters: int = Field(description="distinct raters of the open samples; a sample without a rater counts as one")
    batch_size: int
    triggered: bool = Field(description="whether two samples are enough for the next batch")
    waiting_for: str = Field(description="what the next batch waits for")
    waiting_setting: str | None = Field(
        description='the setting that decides what it waits for, e.g. "trainer.min_batch_size"; null if none does'
    )
    updates: list[UpdateView] = Field(description="the latest ones, without their metrics")


class RewardsView(BaseModel):
    object: Literal["rewards"] = "rewards"
    policy: str
    overridden: bool = Field(description="whether the policy overrides the deployment's rewards")
    rewards: dict[str, Any]


@router.get("/training")
async def get_training(context: ViewedPolicyDep) -> TrainingView:
    """Return the mode of learning, the samples that wait, and what the next batch waits for."""
    settings = context.settings
    async with context.read() as (session, policy):
        counts = await service.count_samples(session, policy, settings)
        rows = await service.list_batches(session, policy, None, NUM_LATEST_UPDATES)
        updates = await _view_updates(session, policy, rows[:NUM_LATEST_UPDATES])
        triggered = await service.is_triggered(session, policy)
        wait = await service.explain_wait(session, policy, counts, settings, triggered=triggered)
        return TrainingView.from_row(
            policy,
            policy=policy.name,
            reason=policy.mode_reason,
            since=policy.mode_since,
            samples=SamplesView(open=counts.ready, not_ready=counts.not_ready, quarantined=counts.quarantined),
            raters=counts.raters,
            batch_size=effective_settings(policy, settings).trainer.batch_size,
            triggered=triggered,
            waiting_for=wait.sentence,
            waiting_setting=wait.setting,
            updates=[view.model_copy(update={"metrics": {}}) for view in updates],
        )


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
        rows = await service.list_batches(session, policy, after, limit)
        return UpdatePage.from_rows(await _view_updates(session, policy, rows), limit)


@router.get("/rewards")
async def get_rewards(context: ViewedPolicyDep) -> RewardsView:
    """Return the policy's own rewards, or the deployment's."""
    async with context.read() as (_, policy):
        return _view_rewards(context, policy)


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
    return _view_rewards(context, policy)


@router.delete("/rewards")
async def reset_rewards(context: PolicyDep) -> RewardsView:
    """Return to the deployment's rewards."""
    async with context.write() as locked:
        await reset_override(locked, "rewards", actor=context.actor)
    return _view_rewards(context, locked.policy)


async def _control(act: Control, context: PolicyContext, body: Reason) -> TrainingView:
    async with context.write() as locked:
        act(locked, actor=context.actor, reason=body.reason)
    return await get_training(context)


def _view_rewards(context: PolicyContext, policy: Policy) -> RewardsView:
    rewards = redact_rewards(effective_rewards(policy, context.settings))
    return RewardsView(policy=policy.name, overridden=policy.rewards is not None, rewards=rewards)


async def _view_updates(session: AsyncSession, policy: Policy, rows: list[Batch]) -> list[UpdateView]:
    numbers = await repository.find_numbers(session, {id for row in rows for id in (row.parent_id, row.version_id)})
    names: dict[str | None, str] = {id: format_reference(policy.name, number) for id, number in numbers.items()}
    return [
        UpdateView.from_row(
            row,
            parent=names[row.parent_id],
            version=names.get(row.version_id),
            samples=row.num_samples,
            raters=row.num_raters,
        )
        for row in rows
    ]
