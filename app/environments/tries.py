"""One try of a claimed attempt: begin its episode, and record how it went under the fence of the claim."""

import hashlib
from dataclasses import dataclass

from sqlalchemy import select, update
from sqlalchemy.engine import Connection
from sqlalchemy.ext.asyncio import AsyncSession

from app.core.database import Database
from app.core.errors import Conflict, NotFound, require_row
from app.core.jobs import enqueue_after_commit
from app.core.settings import Settings
from app.environments.claims import FREE, lease_lost, lock_held, lose_try
from app.environments.schemas import AttemptView, FinishRequest, Plan, StartRequest
from app.environments.service import get_run, plan_of
from app.episodes import service as episodes
from app.episodes.schemas import EpisodeGroup, EpisodeLimits, EpisodeRequest, EpisodeView
from app.feedback.feedback_limits import FeedbackLimits
from app.models import LOST_REASONS, AttemptReason, AttemptState, EndReason, Episode, PlannedRun, RunAttempt
from app.projects.auth import Caller

MAX_FAILED = 2  # tries of an attempt that were reported as lost
MAX_GROUP_NAME = 255
# The service ends an episode this much later than the environment, which then grades what there is.
DEADLINE_MARGIN_SECONDS = 5.0


async def start(
    session: AsyncSession,
    settings: Settings,
    caller: Caller,
    caller_key: str,
    name: str,
    attempt_id: str,
    request: StartRequest,
) -> tuple[EpisodeView, str, bool]:
    """Create the episode of a claimed attempt. Returns what `episodes.create` does; the same request again has the same
    episode. Raises NotFound, and Conflict for a lost lease or another task under the same number.
    """
    run = await get_run(session, caller.project_id, name)
    attempt = await lock_held(session, run, attempt_id, request.fence)
    if attempt is None:
        raise lease_lost(attempt_id)
    digest = hashlib.sha256(request.task.encode()).hexdigest()
    await _require_same_task(session, run, attempt, digest)
    key = hashlib.sha256(f"{attempt.id}/{attempt.fence}".encode()).hexdigest()
    body = _episode_of(run, plan_of(run), request)
    view, secret, is_replay = await episodes.create(session, settings, caller, caller_key, body, key)
    attempt.episode_id, attempt.task_sha256 = view.id, digest
    return view, secret, is_replay


async def _require_same_task(session: AsyncSession, run: PlannedRun, attempt: RunAttempt, digest: str) -> None:
    """Raise Conflict if another process has another task under this number: their environments differ."""
    of_task = (RunAttempt.run_id == run.id, RunAttempt.task_index == attempt.task_index)
    others = select(RunAttempt.task_sha256).where(*of_task, RunAttempt.task_sha256.is_not(None))
    known = await session.scalar(others.order_by(RunAttempt.attempt_index).limit(1))
    if known not in (None, digest):
        message = (
            f"Task {attempt.task_index} of the run '{run.name}' had another name before: an environment must yield the "
            "same tasks for the same split and seed, in every process."
        )
        raise Conflict(message, code="run_task_differs", param="task")


def _episode_of(run: PlannedRun, plan: Plan, request: StartRequest) -> EpisodeRequest:
    group_name = f"{run.name}/{request.task}"
    if len(group_name) > MAX_GROUP_NAME:
        group_name = f"{run.name}/{hashlib.sha256(request.task.encode()).hexdigest()}"
    seconds = plan.limits.deadline_seconds + DEADLINE_MARGIN_SECONDS
    of_run = {"run": run.name, "split": plan.split, "seed": str(plan.seed)}
    return EpisodeRequest(
        policy=plan.policy,
        task=request.task,
        metadata={**request.description, **plan.metadata, **of_run},
        group=EpisodeGroup(id=group_name, size=plan.group_size) if plan.group_size > 1 else None,
        limits=EpisodeLimits(
            # The environment's own time between two chats is none of the agent's doing.
            idle_seconds=seconds,
            deadline_seconds=seconds,
            max_turns=plan.limits.max_turns,
            max_tokens=plan.limits.max_tokens,
        ),
        sampling="policy",  # agents that send temperature 0 would leave nothing to learn from
        service_tier="flex",  # chats of people come first
        version=plan.version,
    )


async def release(session: AsyncSession, project_id: str, name: str, attempt_id: str, fence: int) -> None:
    """Give a claimed attempt back, such as at an interruption: its episode ends as abandoned, and the try does not
    count. The same request again changes nothing. Raises NotFound, and Conflict for a lost lease."""
    run = await get_run(session, project_id, name)
    attempt = await lock_held(session, run, attempt_id, fence)
    if attempt is not None:
        await lose_try(session, project_id, attempt, EndReason.ABANDONED)


@dataclass(frozen=True)
class _Held:
    """What `finish` reads of an attempt."""

    fence: int
    lease_owner: str | None
    episode_id: str | None
    num_failed: int


async def finish(
    db: Database,
    limits: FeedbackLimits,
    project_id: str,
    name: str,
    attempt_id: str,
    request: FinishRequest,
    failure_outcome: float | None,
) -> str | None:
    """Record how the try of a claimed attempt went, in one transaction with the end of its episode. Returns the id of
    that, or None if it never began.

    A lost one is repeated once. The same request again changes nothing. `failure_outcome`: as `default_outcome` of
    `episodes.end`. Raises NotFound, and Conflict for a lost lease, or an episode with another end.
    """

    def write(connection: Connection) -> str | None:
        held = _lock(connection, project_id, name, attempt_id)
        if held.fence != request.fence:
            raise lease_lost(attempt_id)
        if held.lease_owner is None:
            return held.episode_id
        if held.episode_id is not None:
            default = failure_outcome if request.reason == EndReason.FAILED.value else None
            episodes.record_end(connection, project_id, held.episode_id, request.report(), limits, default)
            enqueue_after_commit(connection, "curate")
        elif request.reason not in LOST_REASONS:
            raise Conflict(f"The attempt '{attempt_id}' was not begun.", code="attempt_not_begun")
        values = {"state": AttemptState.DONE, **FREE}
        if request.reason in LOST_REASONS:
            values = _values_of_lost(held)
            if held.episode_id is not None:
                connection.execute(update(Episode).where(Episode.id == held.episode_id).values(group_id=None))
        connection.execute(update(RunAttempt).where(RunAttempt.id == attempt_id).values(values))
        return held.episode_id

    return await db.run_write(write)


def _lock(connection: Connection, project_id: str, name: str, attempt_id: str) -> _Held:
    of_run = (PlannedRun.project_id == project_id, PlannedRun.name == name)
    run_id = connection.scalar(select(PlannedRun.id).where(*of_run))
    if run_id is None:
        raise NotFound(f"There is no run '{name}'.", param="run")
    columns = (RunAttempt.fence, RunAttempt.lease_owner, RunAttempt.episode_id, RunAttempt.num_failed)
    query = select(*columns).where(RunAttempt.run_id == run_id, RunAttempt.id == attempt_id).with_for_update()
    row = connection.execute(query).tuples().one_or_none()
    return _Held(*require_row(row, f"The run has no attempt '{attempt_id}'.", param="attempt_id"))


def _values_of_lost(held: _Held) -> dict[str, object]:
    num_failed = held.num_failed + 1
    values: dict[str, object] = {"num_failed": num_failed, **FREE}
    if num_failed < MAX_FAILED:
        return {**values, "episode_id": None}
    return {**values, "state": AttemptState.LOST, "reason": AttemptReason.FAILED_TRIES}


async def view_attempt(
    session: AsyncSession, project_id: str, name: str, attempt_id: str, episode_id: str | None = None
) -> AttemptView:
    """Return the view of an attempt, with this episode, or else that of its latest try. Raises NotFound."""
    run = await get_run(session, project_id, name)
    query = select(RunAttempt).where(RunAttempt.run_id == run.id, RunAttempt.id == attempt_id)
    attempt = require_row(await session.scalar(query), f"The run has no attempt '{attempt_id}'.", param="attempt_id")
    return await build_view(session, project_id, attempt, episode_id)


async def build_view(
    session: AsyncSession, project_id: str, attempt: RunAttempt, episode_id: str | None = None
) -> AttemptView:
    shown = episode_id or attempt.episode_id
    return AttemptView(
        id=attempt.id,
        task_index=attempt.task_index,
        attempt_index=attempt.attempt_index,
        state=AttemptState(attempt.state).value,
        reason=attempt.reason,
        fence=attempt.fence,
        episode=None if shown is None else await episodes.get(session, project_id, shown),
    )
