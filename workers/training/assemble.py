"""Freeze ready samples into batches. Freshness is decided here; what a batch has, in app.training.plan_batch."""

import logging
import time
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from enum import Enum
from functools import partial

from sqlalchemy import ColumnElement, Select, and_, exists, select, true, update
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import InstrumentedAttribute

from app.core.database import Database, database_time
from app.core.jobs import enqueue_after_commit
from app.core.run_each import run_each, take_turns
from app.core.settings import Settings
from app.models import (
    ONCE_LIVE,
    Batch,
    BatchState,
    LearningMode,
    Policy,
    PolicyState,
    Sample,
    SampleRule,
    SampleState,
    Version,
    new_id,
)
from app.policies import repository
from app.policies.locks import LockedPolicy, lock_policy
from app.policies.overrides import effective_settings
from app.training import batch_samples, line_moves, refused_rewards, sample_failures, service
from app.training.fruitless_looks import begin_look
from app.training.plan_batch import plan_batch
from app.training.sample_columns import fill_columns, is_open
from workers.feedback.rewards import update_turn_samples
from workers.training.contrast import Contrast, find_contrast
from workers.training.line_moves import finish_moves

log = logging.getLogger("attune.assemble")

AUTOMATED_STALENESS = 8  # versions; learning is unharmed up to there (docs/learning.md), and new samples keep coming

RUN_SECONDS = 5.0
STEP = 500  # samples that one transaction prepares: with SQLite, every chat and vote waits for it


class Outcome(Enum):
    """What a transaction of the assembly of one policy has done."""

    NOTHING = "nothing"
    PREPARED = "prepared"  # some samples were completed, compared or dropped, and others follow
    FROZEN = "frozen"  # a batch


async def assemble(db: Database, settings: Settings) -> int:
    """Finish the moves of samples after rollbacks, then freeze at most one batch per policy, the projects taking turns.

    A policy whose samples are prepared in several steps has its next one after the other policies.

    Returns how many were frozen. After RUN_SECONDS the task is enqueued again, so that other tasks of the same worker
    can run.
    """
    start = time.monotonic()
    is_late = are_moved = False
    waiting: deque[str] = deque()

    def take_waiting() -> Iterator[str]:
        while waiting:
            yield waiting.popleft()

    async def assemble_policy(policy_id: str) -> int:
        nonlocal is_late
        is_late = is_late or time.monotonic() > start + RUN_SECONDS
        if is_late:
            return 0
        # Curation may lock the same samples in another order.
        outcome = await db.retry_on_deadlock(partial(_assemble, policy_id=policy_id, settings=settings))
        if outcome == Outcome.PREPARED:
            waiting.append(policy_id)
            await db.let_others_write()
        return outcome == Outcome.FROZEN

    try:
        try:
            are_moved = await finish_moves(db, start + RUN_SECONDS / 2)  # the others follow, however long it takes
        finally:
            async with db.read() as session:
                is_trained = (Policy.mode != LearningMode.HALTED, Policy.state == PolicyState.ACTIVE)
                query = select(Policy.project_id, Policy.id).where(*is_trained).order_by(Policy.id)
                waiting.extend(take_turns((await session.execute(query)).tuples()))
            num_frozen = await run_each(take_waiting(), assemble_policy, "the assembly of")
        return num_frozen
    finally:
        if is_late or not are_moved:
            async with db.write() as session:
                enqueue_after_commit(session, "assemble")


async def _assemble(session: AsyncSession, policy_id: str, settings: Settings) -> Outcome:
    locked = await lock_policy(session, policy_id)
    policy = locked.policy
    assert policy.head_version_id is not None
    head = await repository.get_version(session, policy.head_version_id)
    has_open_batch = await session.scalar(
        select(exists().where(Batch.policy_id == policy_id, Batch.state == BatchState.OPEN))
    )
    is_trained = policy.mode != LearningMode.HALTED and policy.state == PolicyState.ACTIVE
    if not is_trained or has_open_batch or head.state not in ONCE_LIVE:
        return Outcome.NOTHING  # one update at a time, and only from a version that was released
    if await line_moves.is_moving(session, policy_id):
        return (
            Outcome.NOTHING
        )  # other versions may still take back samples that are open, and undone ones return theirs
    settings = effective_settings(policy, settings)
    is_triggered = await service.is_triggered(session, policy)
    look = await begin_look(session, policy, settings, is_triggered=is_triggered)
    if await look.is_repetition(session):
        return Outcome.NOTHING
    if await fill_columns(session, policy_id, STEP) == STEP or await _drop_old_samples(session, policy, settings):
        return Outcome.PREPARED
    if await sample_failures.count_failures(session, policy_id, STEP) == STEP:
        return Outcome.PREPARED
    contrast = await find_contrast(session, policy_id, settings.algorithm, STEP)
    if contrast == Contrast.UNKNOWN:
        return Outcome.PREPARED
    plan = await plan_batch(session, policy, settings) if contrast == Contrast.EXISTS else None
    if plan is None or not plan.samples:
        await look.record(session, settings.trainer.max_wait_seconds)
        return Outcome.NOTHING
    aside = await refused_rewards.set_aside(locked, [sample.turn_id for sample in plan.samples])
    if aside.num_samples:
        log.info("%d samples of blocked or quarantined raters are in no batch of %s", aside.num_samples, policy.name)
        if aside.uncomputed:
            await update_turn_samples(session, aside.uncomputed, settings)
        return Outcome.PREPARED
    await _freeze(locked, head, plan.samples)
    return Outcome.FROZEN


async def _drop_old_samples(session: AsyncSession, policy: Policy, settings: Settings) -> bool:
    """Drop the samples of replies that are older than the limits of the settings, at most STEP for each limit.

    Samples with automated rewards are dropped after a few versions: there are always new ones. Returns whether others
    may be left.
    """
    max_age = settings.trainer.max_sample_age_seconds
    reason = f"its reply is older than {max_age / 86400:g} days"
    # Of a sample that curation has just added, `replied_at` is not known yet. The time is a number, since PostgreSQL
    # expects that a third of all samples is older than an expression.
    is_old = and_(Sample.replied_at < await database_time(session) - max_age, Sample.origin.is_not(None))
    limits = [await _drop(session, policy, is_old, (Sample.replied_at, Sample.turn_id), reason, STEP)]
    limits.append(await _drop_stale(session, policy, AUTOMATED_STALENESS, (True,)))
    if settings.trainer.max_staleness is not None:
        limits.append(await _drop_stale(session, policy, settings.trainer.max_staleness, (True, False)))
    return max(limits) == STEP


async def _drop_stale(session: AsyncSession, policy: Policy, max_staleness: int, is_automated: Collection[bool]) -> int:
    """Drop the samples whose version is not the head or one of its last `max_staleness` parents, at most STEP.

    Args:
        is_automated: Drop those whose rewards are automated, or are not, or both.
    """
    line = await repository.list_ancestors(session, policy.head_version_id or "", max_staleness)
    reason = f"its version is not v{line[0].number} or one of the {len(line) - 1} versions before it"
    num_dropped = 0
    for value in is_automated:
        for version_id in await _find_stale_versions(session, policy.id, value, [version.id for version in line]):
            # One version after the other: of a list of them, SQLite would look for all open samples without statistics.
            is_stale = and_(Sample.is_automated.is_(value), Sample.version_id == version_id)
            limit = STEP - num_dropped
            num_dropped += await _drop(session, policy, is_stale, (Sample.turn_id,), reason, limit)
            if num_dropped == STEP:
                return STEP
    return num_dropped


async def _find_stale_versions(
    session: AsyncSession, policy_id: str, is_automated: bool, line: Collection[str]
) -> list[str]:
    """Return the versions of open samples that are not in the line, at most STEP.

    Each version is found by one look into an index, however many samples it has.
    """
    is_one = (Sample.policy_id == policy_id, is_open(), Sample.is_automated.is_(is_automated))

    def first_version(after: ColumnElement[bool]) -> Select[str]:
        return select(Sample.version_id).where(*is_one, after).order_by(Sample.version_id).limit(1)

    versions = select(first_version(true()).scalar_subquery().label("id")).cte("versions", recursive=True)
    following = first_version(Sample.version_id > versions.c.id).correlate(versions).scalar_subquery()
    versions = versions.union_all(select(following).where(versions.c.id.is_not(None)))
    is_stale = (versions.c.id.is_not(None), versions.c.id.not_in(line))
    return list(await session.scalars(select(versions.c.id).where(*is_stale).limit(STEP)))


async def _drop(
    session: AsyncSession,
    policy: Policy,
    condition: ColumnElement[bool],
    order: Sequence[InstrumentedAttribute[str] | InstrumentedAttribute[float]],
    reason: str,
    limit: int,
) -> int:
    """Drop the open samples with this condition, the first `limit` in this order. Return how many were found."""
    found = select(Sample.turn_id).where(Sample.policy_id == policy.id, is_open(), condition)
    turn_ids = list(await session.scalars(found.order_by(*order).limit(limit)))
    if turn_ids:
        values = {"state": SampleState.DROPPED, "rule": SampleRule.TOO_OLD, "reason": reason}
        # Without the policy: with it, SQLite would read all open samples of the policy, and not these alone.
        is_found = (Sample.turn_id.in_(turn_ids), is_open(), condition)  # a vote may have changed one meanwhile
        await session.execute(update(Sample).where(*is_found).values(values))
    return len(turn_ids)


async def _freeze(locked: LockedPolicy, head: Version, samples: list[Sample]) -> None:
    """Create the batch and enqueue its training."""
    session, policy = locked
    batch = Batch(
        id=new_id("bat"),
        policy_id=policy.id,
        parent_id=head.id,
        state=BatchState.OPEN,
        num_samples=len(samples),
        num_raters=len({sample.rater for sample in samples if sample.rater is not None}),
    )
    session.add(batch)
    await session.flush()
    await batch_samples.freeze(locked, batch, samples)
    enqueue_after_commit(session, "train")
