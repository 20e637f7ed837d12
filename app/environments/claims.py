"""Claims of the attempts of a run: a process holds the lease of what it plays, and plays again what dead ones left.

The attempts at a task are claimed one after another, so that a group is ready early. Rows of attempts are added when
they are claimed first. A lost try leaves its group: the next one takes its place there.
"""

from sqlalchemy import ColumnElement, delete, exists, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from app.core import leases
from app.core.database import dialect_insert, now
from app.core.errors import Conflict, require_row
from app.core.jobs import enqueue_after_commit
from app.core.leases import lease_is_free
from app.core.settings import Settings
from app.environments.service import get_run, plan_of
from app.episodes.episode_ends import record_report
from app.episodes.schemas import EndRequest
from app.models import (
    LOST_REASONS,
    AttemptReason,
    AttemptState,
    EndReason,
    Episode,
    LearningMode,
    PlannedRun,
    Policy,
    RunAttempt,
    new_id,
)
from app.policies import repository as policies
from app.policies.overrides import effective_settings

MAX_EXPIRED = 5  # tries of an attempt whose processes died: it may be what kills them
FREE: dict[str, object] = {"lease_owner": None, "lease_until": None}


def is_held(attempt_id: str, fence: int) -> ColumnElement[bool]:
    """Return the condition that a claim is still the latest one of an attempt, and not finished."""
    return (RunAttempt.id == attempt_id) & (RunAttempt.fence == fence) & RunAttempt.lease_owner.is_not(None)


def lease_lost(attempt_id: str) -> Conflict:
    message = (
        f"The attempt '{attempt_id}' is no longer held with this fence: its lease has run out, and it is played again."
    )
    return Conflict(message, code="lease_lost", param="fence")


async def claim(
    session: AsyncSession,
    settings: Settings,
    project_id: str,
    name: str,
    owner: str,
    num_tasks: int | None,
) -> tuple[RunAttempt | None, bool]:
    """Return the attempt that the owner holds now, or None if none is left, and whether the run is complete.

    `num_tasks`: how many tasks the environment has, if they are fewer than those of the run. Raises NotFound.
    """
    run = await get_run(session, project_id, name, for_update=True)
    if num_tasks is not None and num_tasks < run.num_tasks:
        await _drop_tasks(session, run, num_tasks)
    is_open = (RunAttempt.run_id == run.id, RunAttempt.state == AttemptState.OPEN)
    is_own = (RunAttempt.lease_owner == owner, ~lease_is_free(RunAttempt))
    if (held := await session.scalar(select(RunAttempt).where(*is_open, *is_own))) is not None:
        return held, False
    if run.cancelled_at is not None:
        is_under_way = exists().where(*is_open, ~lease_is_free(RunAttempt))
        return None, not await session.scalar(select(is_under_way))
    while (attempt := await _next_free(session, run)) is not None:
        if attempt.lease_owner is not None:
            await settle_expired(session, project_id, attempt)
            continue
        if await _is_of_stale_group(session, settings, run, attempt):
            await _cancel_group(session, run, attempt)
            continue
        seconds = settings.workers.lease_seconds
        states = (AttemptState.OPEN,)
        await leases.claim(session, RunAttempt, attempt.id, owner=owner, seconds=seconds, states=states)
        await session.refresh(attempt)
        return attempt, False
    return None, not await session.scalar(select(exists().where(*is_open)))


async def _drop_tasks(session: AsyncSession, run: PlannedRun, num_tasks: int) -> None:
    """Leave out the tasks that the environment does not have. Attempts that somebody began are cancelled."""
    is_beyond = (RunAttempt.run_id == run.id, RunAttempt.task_index >= num_tasks, RunAttempt.state == AttemptState.OPEN)
    await session.execute(delete(RunAttempt).where(*is_beyond, RunAttempt.episode_id.is_(None)))
    cancelled = {"state": AttemptState.CANCELLED, "reason": AttemptReason.NO_TASK, **FREE}
    await session.execute(update(RunAttempt).where(*is_beyond).values(cancelled))
    run.num_tasks, run.num_added = num_tasks, min(run.num_added, num_tasks)


async def _next_free(session: AsyncSession, run: PlannedRun) -> RunAttempt | None:
    """Return the first attempt whose lease is free, locked. Those at the next task are added when none is left."""
    is_free = (RunAttempt.run_id == run.id, RunAttempt.state == AttemptState.OPEN, lease_is_free(RunAttempt))
    in_order = select(RunAttempt).where(*is_free).order_by(RunAttempt.task_index, RunAttempt.attempt_index).limit(1)
    query = in_order.with_for_update().execution_options(populate_existing=True)
    while (attempt := await session.scalar(query)) is None and run.num_added < run.num_tasks:
        rows = [
            {
                "id": new_id("att"),
                "run_id": run.id,
                "task_index": run.num_added,
                "attempt_index": index,
                "state": AttemptState.OPEN,
                **dict.fromkeys(("num_failed", "num_expired", "attempt", "fence"), 0),
                "created_at": now(),
            }
            for index in range(plan_of(run).group_size)
        ]
        # Rows of a task that the environment lacked for a while may be there.
        await session.execute(dialect_insert(session, RunAttempt).values(rows).on_conflict_do_nothing())
        run.num_added += 1
    return attempt


async def settle_expired(session: AsyncSession, project_id: str, attempt: RunAttempt) -> None:
    """Take the attempt from a process that has died, or lost its connection: its try is lost, unless it was reported.

    The try costs no repetition of those that the environment has.
    """
    attempt.fence += 1  # what that process reports later is refused
    attempt.num_expired += 1
    if attempt.num_expired >= MAX_EXPIRED:
        attempt.state, attempt.reason = AttemptState.LOST, AttemptReason.DEAD_PROCESSES
    await lose_try(session, project_id, attempt, EndReason.INFRASTRUCTURE)


async def lose_try(session: AsyncSession, project_id: str, attempt: RunAttempt, reason: EndReason) -> None:
    """Free the attempt, end the episode of its try, and remove that from its group. `attempt` is locked.

    If the environment has reported the end of the episode itself, the attempt is done.
    """
    attempt.lease_owner = attempt.lease_until = None
    if attempt.episode_id is None:
        return
    episode = await session.get_one(Episode, attempt.episode_id, with_for_update=True, populate_existing=True)
    if episode.end_fingerprint is None:
        connection = await session.connection()
        report = EndRequest(outcome=None, reason=reason.value)
        await connection.run_sync(record_report, project_id, episode.id, report)
        enqueue_after_commit(session, "curate")
    elif episode.reported_reason not in LOST_REASONS:
        attempt.state, attempt.reason = AttemptState.DONE, None
        return
    await leave_group(session, episode.id)
    if attempt.state == AttemptState.OPEN:
        attempt.episode_id = None


async def leave_group(session: AsyncSession, episode_id: str) -> None:
    """Remove the episode of a lost try from its group, where the next try takes its place."""
    await session.execute(update(Episode).where(Episode.id == episode_id).values(group_id=None))


async def _is_of_stale_group(session: AsyncSession, settings: Settings, run: PlannedRun, attempt: RunAttempt) -> bool:
    """Return whether the others of the group began at a version that nothing is learned from any more.

    That is the rule by which training takes samples: with `trainer.max_staleness`, the head and so many of its parents.
    """
    if plan_of(run).group_size == 1:
        return False
    policy = await session.get_one(Policy, run.policy_id, populate_existing=True)
    steps = effective_settings(policy, settings).trainer.max_staleness
    if policy.mode == LearningMode.SYNCHRONOUS:
        steps = 0
    if steps is None or policy.head_version_id is None:
        return False
    first = (
        select(Episode.start_version_id)
        .join(RunAttempt, RunAttempt.episode_id == Episode.id)
        .where(RunAttempt.run_id == run.id, RunAttempt.task_index == attempt.task_index)
        .where(Episode.start_version_id.is_not(None), RunAttempt.state.in_((AttemptState.OPEN, AttemptState.DONE)))
        .order_by(Episode.created_at, Episode.id)
        .limit(1)
    )
    version_id = await session.scalar(first)
    if version_id in (None, policy.head_version_id):
        return False
    line = await policies.list_ancestors(session, policy.head_version_id, steps)
    return version_id not in {version.id for version in line}


async def _cancel_group(session: AsyncSession, run: PlannedRun, attempt: RunAttempt) -> None:
    """Cancel the attempts of this one's group that are not under way."""
    of_group = (RunAttempt.run_id == run.id, RunAttempt.task_index == attempt.task_index)
    is_waiting = (RunAttempt.state == AttemptState.OPEN, lease_is_free(RunAttempt))
    cancelled = {"state": AttemptState.CANCELLED, "reason": AttemptReason.STALE_GROUP, **FREE}
    await session.execute(update(RunAttempt).where(*of_group, *is_waiting).values(cancelled))


async def renew(
    session: AsyncSession, settings: Settings, project_id: str, name: str, fences: dict[str, int]
) -> list[str]:
    """Renew the leases of these attempts, by id. Returns those that the caller does not hold any more.

    A lease that has run out is renewed if nobody has claimed the attempt since. Raises NotFound.
    """
    run = await get_run(session, project_id, name)
    values = {"lease_until": now() + settings.workers.lease_seconds, "heartbeat_at": now()}
    lost: list[str] = []
    for id, fence in sorted(fences.items()):  # in one order, so that two requests do not wait for each other
        renewal = update(RunAttempt).where(RunAttempt.run_id == run.id, is_held(id, fence)).values(values)
        if not (await session.execute(renewal)).rowcount:  # type: ignore[attr-defined]
            lost.append(id)
    return lost


async def lock_held(session: AsyncSession, run: PlannedRun, attempt_id: str, fence: int) -> RunAttempt | None:
    """Return the attempt, locked, or None if this claim was finished before. Raises NotFound, and Conflict if the
    lease was lost."""
    query = select(RunAttempt).where(RunAttempt.run_id == run.id, RunAttempt.id == attempt_id).with_for_update()
    attempt = require_row(await session.scalar(query), f"The run has no attempt '{attempt_id}'.", param="attempt_id")
    if attempt.fence != fence:
        raise lease_lost(attempt_id)
    return attempt if attempt.lease_owner is not None else None
