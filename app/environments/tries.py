"""One try of a claimed attempt: begin its episode, and record how it went under the fence of the claim."""

import hashlib

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from app.core.errors import Conflict
from app.core.jobs import enqueue_after_commit
from app.core.settings import Settings
from app.environments.claims import lease_lost, leave_group, lock_held, lose_try
from app.environments.schemas import FinishRequest, Plan, StartRequest
from app.environments.service import get_run, plan_of
from app.episodes import episode_ends
from app.episodes import service as episodes
from app.episodes.schemas import EpisodeGroup, EpisodeLimits, EpisodeRequest, EpisodeView
from app.feedback.feedback_limits import FeedbackLimits
from app.models import LOST_REASONS, AttemptReason, AttemptState, EndReason, PlannedRun, RunAttempt
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


async def finish(
    session: AsyncSession,
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
    `episode_ends.end`. Raises NotFound, and Conflict for a lost lease, or an episode with another end.
    """
    run = await get_run(session, project_id, name)
    attempt = await lock_held(session, run, attempt_id, request.fence)
    if attempt is None:
        query = select(RunAttempt.episode_id).where(RunAttempt.id == attempt_id)
        return await session.scalar(query)
    episode_id = attempt.episode_id
    is_lost = request.reason in LOST_REASONS
    if episode_id is None and not is_lost:
        raise Conflict(f"The attempt '{attempt_id}' was not begun.", code="attempt_not_begun")
    if episode_id is not None:
        default = failure_outcome if request.reason == EndReason.FAILED.value else None
        connection = await session.connection()
        await connection.run_sync(episode_ends.record_end, project_id, episode_id, request.report(), limits, default)
        enqueue_after_commit(session, "curate")
    if not is_lost:
        attempt.state = AttemptState.DONE
    else:
        if episode_id is not None:
            await leave_group(session, episode_id)
        attempt.num_failed += 1
        if attempt.num_failed >= MAX_FAILED:
            attempt.state, attempt.reason = AttemptState.LOST, AttemptReason.FAILED_TRIES
        else:
            attempt.episode_id = None
    attempt.lease_owner = attempt.lease_until = None
    return episode_id
