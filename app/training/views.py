"""The state of learning, the updates and the rewards of a policy, as the API and the console show them."""

from typing import Any, Literal

from pydantic import BaseModel, Field
from sqlalchemy.ext.asyncio import AsyncSession

from app.core.http import RowView
from app.core.pagination import Page
from app.core.settings import Settings
from app.models import Batch, Policy
from app.policies import repository
from app.policies.overrides import effective_settings
from app.policies.references import format_reference
from app.training import service
from app.training.policy_config import effective_rewards, redact_rewards
from app.training.waits import explain_wait

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


async def view_training(session: AsyncSession, policy: Policy, settings: Settings) -> TrainingView:
    """Return the mode of learning, the samples that wait, and what the next batch waits for."""
    counts = await service.count_samples(session, policy, settings)
    rows = await service.list_batches(session, policy, None, NUM_LATEST_UPDATES)
    updates = await _view_updates(session, policy, rows[:NUM_LATEST_UPDATES])
    triggered = await service.is_triggered(session, policy)
    wait = await explain_wait(session, policy, counts, settings, triggered=triggered)
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


async def view_updates(session: AsyncSession, policy: Policy, limit: int, after: str | None = None) -> UpdatePage:
    """Return batches with the metrics of their updates, the newest first, after the one with the id `after`."""
    rows = await service.list_batches(session, policy, after, limit)
    return UpdatePage.from_rows(await _view_updates(session, policy, rows), limit)


def view_rewards(policy: Policy, settings: Settings) -> RewardsView:
    """Return the policy's own rewards, or the deployment's, without secrets."""
    rewards = redact_rewards(effective_rewards(policy, settings))
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
