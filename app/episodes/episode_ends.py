"""End episodes as their programs report it. The outcome that a report names is feedback on the episode."""

from sqlalchemy import select, update
from sqlalchemy.engine import Connection
from sqlalchemy.ext.asyncio import AsyncSession

from app.core.database import Database, now
from app.core.errors import AttuneError, Conflict, Forbidden, NotFound
from app.core.jobs import enqueue_after_commit
from app.core.rows import AnyRow
from app.core.settings import Settings
from app.episodes.fingerprints import fingerprint_of_end
from app.episodes.schemas import EndRequest
from app.feedback.feedback_limits import FeedbackLimits
from app.feedback.feedback_writer import build_submission, submit_many
from app.feedback.kinds import parse_feedback
from app.models import EndReason, Episode, EpisodeState, Policy, SourceKind
from app.policies.overrides import effective_settings
from app.projects.auth import Caller
from app.projects.scopes import PROGRAMS_SCOPE, has_scope

OUTCOME_NAME = "outcome"
OUTCOME_SOURCE = {"kind": SourceKind.CODE.value, "id": "episode"}


def may_report_outcome(caller: Caller) -> bool:
    """Return whether the key may report an outcome, which is feedback of a program."""
    return has_scope(caller.scopes, "feedback") and PROGRAMS_SCOPE in caller.scopes


def require_outcome_scope(caller: Caller) -> None:
    """Raise Forbidden if the key may not report an outcome."""
    if not may_report_outcome(caller):
        message = f"An outcome needs the scopes 'feedback' and '{PROGRAMS_SCOPE}', which this API key lacks."
        raise Forbidden(message, param="outcome")


async def read_failure_outcome(session: AsyncSession, settings: Settings, episode_id: str) -> float | None:
    """Return the outcome that the episode's policy gives a failure without one (`rewards.episode_failure`), or None."""
    query = select(Policy).join(Episode, Episode.policy_id == Policy.id).where(Episode.id == episode_id)
    policy = await session.scalar(query)
    return None if policy is None else effective_settings(policy, settings).rewards.episode_failure


async def end(
    db: Database,
    project_id: str,
    episode_id: str,
    request: EndRequest,
    limits: FeedbackLimits,
    default_outcome: float | None = None,
) -> None:
    """Record how an episode went, as `record_end` does."""

    def write(connection: Connection) -> None:
        if record_end(connection, project_id, episode_id, request, limits, default_outcome):
            enqueue_after_commit(connection, "curate")  # feedback on it has waited for the end

    await db.run_write(write)


def record_end(
    connection: Connection,
    project_id: str,
    episode_id: str,
    request: EndRequest,
    limits: FeedbackLimits,
    default_outcome: float | None = None,
) -> bool:
    """Record a report as `record_report` does, with its outcome as feedback; without one `default_outcome` is learned
    from. Returns whether it was the first report."""
    if not record_report(connection, project_id, episode_id, request):
        return False
    outcome = default_outcome if request.outcome is None else request.outcome
    if outcome is not None:
        _write_outcome(connection, project_id, episode_id, outcome, limits)
    return True


def record_report(connection: Connection, project_id: str, episode_id: str, request: EndRequest) -> bool:
    """Record what was reported of an episode's end; the same report again changes nothing. Returns whether it was the
    first one.

    An episode that a limit has ended keeps that reason, and takes the first report's outcome. The caller enqueues
    `curate`. Raises NotFound, and Conflict for another report.
    """
    columns = (Episode.state, Episode.end_reason, Episode.end_fingerprint, Episode.outcome)
    query = select(*columns).where(Episode.id == episode_id, Episode.project_id == project_id)
    row = connection.execute(query.with_for_update()).one_or_none()
    if row is None:
        raise NotFound(f"There is no episode '{episode_id}'.", param="episode_id")
    fingerprint = fingerprint_of_end(request)
    if row.end_fingerprint is not None:
        if row.end_fingerprint != fingerprint:
            raise _other_end(episode_id, row)
        return False
    reason = EndReason(request.reason)
    values: dict[str, object] = {"outcome": request.outcome, "end_fingerprint": fingerprint}
    values |= {"reported_reason": reason, "processed": False}
    if row.state == EpisodeState.OPEN:
        values |= {"state": EpisodeState.ENDED, "end_reason": reason, "ended_at": now()}
    connection.execute(update(Episode).where(Episode.id == episode_id).values(values))
    return True


def _write_outcome(
    connection: Connection, project_id: str, episode_id: str, outcome: float, limits: FeedbackLimits
) -> None:
    body = {
        "kind": "score",
        "value": outcome,
        "name": OUTCOME_NAME,
        "source": OUTCOME_SOURCE,
        "target": {"episode_id": episode_id},
    }
    submission = build_submission(project_id, parse_feedback(body), body)
    [result] = submit_many(connection, [submission], limits)
    if isinstance(result, AttuneError):
        raise result


def _other_end(episode_id: str, row: AnyRow) -> Conflict:
    outcome = "without an outcome" if row.outcome is None else f"with the outcome {row.outcome:g}"
    message = (
        f"The episode '{episode_id}' has been reported before, {outcome} ({row.end_reason}). To change what is learned "
        f'from it, send feedback with the target {{"episode_id": "{episode_id}"}} to POST /v1/feedback.'
    )
    return Conflict(message, code="episode_ended")
