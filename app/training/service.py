"""The state of a policy's learning: the samples that wait, and the trigger of a batch."""

from typing import NamedTuple

from sqlalchemy import ColumnElement, Select, and_, case, func, select, true
from sqlalchemy.ext.asyncio import AsyncSession

from app.core.database import database_time
from app.core.errors import Conflict, require_row
from app.core.jobs import enqueue_after_commit
from app.core.pagination import apply_keyset
from app.core.settings import Settings
from app.models import (
    Audit,
    AuditAction,
    Batch,
    LearningMode,
    Policy,
    PolicyState,
    Sample,
    SampleState,
)
from app.policies.locks import LockedPolicy
from app.policies.overrides import effective_settings
from app.policies.service import audit_policy
from app.training import sample_conditions
from app.training.sample_columns import is_open
from app.training.sample_totals import count_waiting

MIN_TRIGGERED_SAMPLES = 2
MAX_COUNTED = 10_000  # samples that wait, the first ones: no page reads all of a backlog


class SampleCounts(NamedTuple):
    """The samples that training may still use.

    `ready` samples may go into the next batch, `not_ready` ones wait for late feedback, and `quarantined` ones for an
    admin. `raters` are the distinct raters of the ready samples; a sample without a rater counts as one. Of the ready
    ones the algorithm can use `usable`, and `waiting_for_new` of these join a batch only together with as many others
    (`waits_for_new`); `comparable` are in groups with different rewards. `corrected` ones have corrected texts,
    which need no contrast.

    At most MAX_COUNTED are counted, but for the quarantined ones. If there are more ready samples (`is_limited`), all
    that is said of them is about the first ones, up to `counted_until` (of their `ready_at`), with those of that time.
    """

    ready: int
    not_ready: int
    quarantined: int
    raters: int
    oldest_ready_at: float | None
    lowest_reward: float | None
    highest_reward: float | None
    usable: int
    waiting_for_new: int
    comparable: int
    corrected: int
    now: float
    counted_until: float
    is_limited: bool


async def count_samples(session: AsyncSession, policy: Policy, settings: Settings) -> SampleCounts:
    settings = effective_settings(policy, settings)
    is_allowed = await sample_conditions.allowed_samples(session, policy, settings)
    is_own_open = and_(Sample.policy_id == policy.id, is_open())
    time = await database_time(session)
    last = await _find_last_counted(session, and_(is_own_open, is_allowed), time)
    until = time if last is None else last
    usable = sample_conditions.is_learnable(policy, is_allowed, settings, until)
    has_contrast = (
        Sample.is_corrected
        | sample_conditions.is_in_group(
            policy.id, is_allowed, sample_conditions.rewards_differ(settings.algorithm.min_contrast), until
        )
        if settings.algorithm.needs_groups
        else true()
    )
    waiting = await count_waiting(session, [policy.id])
    query = select(
        func.count(),
        count_first(select(Sample.turn_id).where(is_own_open, Sample.ready_at > time, is_allowed)),
        func.count(func.coalesce(Sample.rater, Sample.turn_id).distinct()),
        func.min(Sample.ready_at),
        func.min(Sample.reward),
        func.max(Sample.reward),
        func.count(case((usable, 1))),
        func.count(case((usable & sample_conditions.waits_for_new(), 1))),
        func.count(case((usable & has_contrast, 1))),
        func.count(case((usable & Sample.is_corrected, 1))),
    ).where(is_own_open, is_allowed, Sample.ready_at <= until)
    ready, not_ready, *figures = (await session.execute(query)).one()
    quarantined = waiting.get((policy.id, SampleState.QUARANTINED), 0)
    return SampleCounts._make((ready, not_ready, quarantined, *figures, time, until, last is not None))


async def _find_last_counted(
    session: AsyncSession, is_open_and_allowed: ColumnElement[bool], time: float
) -> float | None:
    """Return the `ready_at` of the last ready sample that is counted; None if there are no others after it."""
    ready_at = select(Sample.ready_at).where(is_open_and_allowed, Sample.ready_at <= time)
    ready_at = ready_at.order_by(Sample.ready_at, Sample.turn_id)
    last = list(await session.scalars(ready_at.offset(MAX_COUNTED - 1).limit(2)))
    return last[0] if len(last) == 2 else None


def count_first(samples: Select[str]) -> ColumnElement[int]:
    """Return the number of the samples, at most MAX_COUNTED, as a SQL expression. They are read by an index."""
    first = samples.order_by(Sample.ready_at, Sample.turn_id).limit(MAX_COUNTED).subquery()
    return select(func.count()).select_from(first).scalar_subquery()


def how_to_continue(policy: Policy) -> str:
    """Return how a policy that is paused or archived is activated again, as the end of a sentence, or ""."""
    verb = {PolicyState.PAUSED: "resume", PolicyState.ARCHIVED: "unarchive"}.get(PolicyState(policy.state))
    return f": learning continues after POST /v1/policies/{policy.name}/{verb}" if verb else ""


def trigger(locked: LockedPolicy, *, actor: str, reason: str | None) -> None:
    """Let the next batch have as few as two samples. Raises Conflict while learning is halted."""
    session, policy = locked
    if policy.state != PolicyState.ACTIVE:
        raise Conflict(f"'{policy.name}' is {policy.state}{how_to_continue(policy)}.", code="policy_not_active")
    if policy.mode == LearningMode.HALTED:
        raise Conflict(f"Learning of '{policy.name}' is halted; resume it first.", code="learning_halted")
    audit_policy(session, policy, AuditAction.TRAINING_TRIGGERED, actor, reason)
    enqueue_after_commit(session, "curate", "assemble")


async def is_triggered(session: AsyncSession, policy: Policy) -> bool:
    """Whether the policy was triggered after its latest batch was frozen. The audit entry is the flag."""
    triggered = select(func.max(Audit.created_at)).where(
        Audit.project_id == policy.project_id,
        Audit.action == AuditAction.TRAINING_TRIGGERED,
        Audit.subject == policy.name,
    )
    frozen = select(func.max(Batch.created_at)).where(Batch.policy_id == policy.id)
    triggered_at, frozen_at = await session.scalar(triggered), await session.scalar(frozen)
    return (triggered_at or 0.0) > (frozen_at or 0.0)


def min_samples(settings: Settings, *, is_triggered: bool) -> int:
    """Return the fewest samples of the next batch. `settings` are the policy's own."""
    return MIN_TRIGGERED_SAMPLES if is_triggered else settings.trainer.smallest_batch


async def list_batches(session: AsyncSession, policy: Policy, after: str | None, limit: int) -> list[Batch]:
    """Return up to `limit + 1` batches, the newest first. Raises NotFound."""
    query, last = select(Batch).where(Batch.policy_id == policy.id), None
    if after is not None:
        row = await session.scalar(query.where(Batch.id == after))
        last = require_row(row, f"There is no update '{after}'.", param="after")
    query = apply_keyset(query, (Batch.created_at, Batch.id), last, limit, descending=True)
    return list(await session.scalars(query))
