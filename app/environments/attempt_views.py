"""Views of the attempts of a run: where each is, and the episode of its latest try."""

from collections.abc import Sequence

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from app.core.errors import require_row
from app.core.leases import lease_is_free
from app.core.pagination import apply_keyset
from app.environments.schemas import AttemptView
from app.environments.service import get_run
from app.episodes import service as episodes
from app.episodes.schemas import EpisodeView
from app.models import AttemptReason, AttemptState, PlannedRun, RunAttempt


async def view_attempt(
    session: AsyncSession, project_id: str, name: str, attempt_id: str, episode_id: str | None = None
) -> AttemptView:
    """Return the view of an attempt, with this episode, or else that of its latest try. Raises NotFound."""
    run = await get_run(session, project_id, name)
    attempt = await _get_attempt(session, run, attempt_id)
    [view] = await view_attempts(session, run, [attempt], episode_id)
    return view


async def list_page(
    session: AsyncSession, run: PlannedRun, *, after: str | None, limit: int, newest_first: bool
) -> list[AttemptView]:
    """Return up to `limit + 1` attempts that were claimed, in the order of tasks. Raises NotFound for `after`."""
    last = None if after is None else await _get_attempt(session, run, after, param="after")
    keyset = (RunAttempt.task_index, RunAttempt.attempt_index)
    query = select(RunAttempt).where(RunAttempt.run_id == run.id)
    attempts = await session.scalars(apply_keyset(query, keyset, last, limit, descending=newest_first))
    return await view_attempts(session, run, list(attempts))


async def view_attempts(
    session: AsyncSession, run: PlannedRun, attempts: Sequence[RunAttempt], episode_id: str | None = None
) -> list[AttemptView]:
    """Return the views of attempts of the run, in their order. `episode_id`: shown in place of the latest try's."""
    shown = {attempt.id: episode_id or attempt.episode_id for attempt in attempts}
    ids = [id for id in shown.values() if id is not None]
    views = await episodes.get_many(session, run.project_id, ids) if ids else {}
    is_held = (RunAttempt.id.in_(shown), RunAttempt.state == AttemptState.OPEN, ~lease_is_free(RunAttempt))
    held = set(await session.scalars(select(RunAttempt.id).where(*is_held).order_by(RunAttempt.id)))
    return [_view(run, attempt, views.get(shown[attempt.id] or ""), attempt.id in held) for attempt in attempts]


def _view(run: PlannedRun, attempt: RunAttempt, episode: EpisodeView | None, is_under_way: bool) -> AttemptView:
    state, reason = AttemptState(attempt.state), attempt.reason
    if run.cancelled_at is not None and state == AttemptState.OPEN and not is_under_way:
        state, reason = AttemptState.CANCELLED, AttemptReason.RUN_CANCELLED
    return AttemptView(
        id=attempt.id,
        task_index=attempt.task_index,
        attempt_index=attempt.attempt_index,
        state=state.value,
        reason=reason,
        is_under_way=is_under_way,
        fence=attempt.fence,
        num_failed=attempt.num_failed,
        num_expired=attempt.num_expired,
        episode=episode,
    )


async def _get_attempt(
    session: AsyncSession, run: PlannedRun, attempt_id: str, param: str = "attempt_id"
) -> RunAttempt:
    query = select(RunAttempt).where(RunAttempt.run_id == run.id, RunAttempt.id == attempt_id)
    return require_row(await session.scalar(query), f"The run has no attempt '{attempt_id}'.", param=param)
