"""Which chats an open episode still admits, and which limit ends it.

The limits on time are checked here before a chat, and by the reconciler for episodes without one. Those on turns and
tokens bite at the next chat only: an agent that has finished within them reports its outcome as usual.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import BindParameter, ColumnElement, and_, bindparam, case, exists, func, null, or_, select, update
from sqlalchemy.engine import Connection
from sqlalchemy.orm import aliased

from app.chat.new_turn import NewTurn
from app.core.database import Database, now
from app.core.errors import AttuneError, Conflict, NotFound
from app.core.jobs import enqueue_after_commit
from app.core.rows import AnyRow
from app.models import REPORTED_REASONS, EndReason, Episode, EpisodeSampling, EpisodeState, Turn, TurnState, VersionRule

LIMITS: dict[str, str] = {
    EndReason.IDLE_TIMEOUT: "no chat of it ran for 'idle_seconds'",
    EndReason.DEADLINE: "its 'deadline_seconds' are over",
    EndReason.MAX_TURNS: "it has its 'max_turns'",
    EndReason.MAX_TOKENS: "it has its 'max_tokens'",
}
MAX_ENDED = 1000  # episodes in one transaction
OF_EPISODE = Turn.episode_id == Episode.id
NUM_TURNS = select(func.coalesce(func.max(Turn.episode_step), 0)).where(OF_EPISODE).scalar_subquery()
IS_COUNTED = Turn.state != TurnState.FAILED  # the engine's failure uses no turn up
NUM_COUNTED = select(func.count(Turn.episode_step.distinct())).where(OF_EPISODE, IS_COUNTED).scalar_subquery()
NUM_TOKENS = select(func.coalesce(func.sum(Turn.num_output_tokens), 0)).where(OF_EPISODE).scalar_subquery()


def _is_idle() -> ColumnElement[bool]:
    """Return the condition that no turn of an episode runs, or has run for `idle_seconds`."""
    since = now() - Episode.idle_seconds
    is_active = or_(Turn.state == TurnState.OPEN, func.coalesce(Turn.finished_at, Turn.created_at) > since)
    return and_(Episode.created_at <= since, ~exists().where(OF_EPISODE, is_active))


IS_EXPIRED = ((Episode.deadline_at <= now(), EndReason.DEADLINE), (_is_idle(), EndReason.IDLE_TIMEOUT))
IS_USED_UP = (
    # The turns are counted only where there are so many requests: that is one look into an index.
    (and_(Episode.max_turns <= NUM_TURNS, Episode.max_turns <= NUM_COUNTED), EndReason.MAX_TURNS),
    (Episode.max_tokens <= NUM_TOKENS, EndReason.MAX_TOKENS),
)
REACHED = case(*[(condition, reason.value) for condition, reason in (*IS_EXPIRED, *IS_USED_UP)], else_=null())


@dataclass(frozen=True)
class OpenEpisode:
    """An episode that admits another chat, and how that chat is answered.

    `own_version_id`: the version that its next chat is answered by, if it is not any: for its first chat the one that
    the other attempts of its group started on, with `leash` or `pin` the one of its first chat.
    `max_staleness`: how far behind that version may be; `is_pinned`: no other version answers.
    """

    episode_id: str
    policy_id: str
    sampling: EpisodeSampling = EpisodeSampling.REQUEST
    own_version_id: str | None = None
    max_staleness: int | None = None
    is_pinned: bool = False
    service_tier: str | None = None  # a ServiceTier; None: as each request asks


ATTEMPT = aliased(Episode)
GROUP_VERSION = (
    select(ATTEMPT.start_version_id)
    .where(
        ATTEMPT.project_id == Episode.project_id,
        ATTEMPT.group_id == Episode.group_id,
        ATTEMPT.policy_id == Episode.policy_id,
        ATTEMPT.start_version_id.is_not(None),
    )
    .order_by(ATTEMPT.created_at, ATTEMPT.id)
    .limit(1)
    .scalar_subquery()
)
STATE_COLUMNS = (
    *(Episode.id, Episode.policy_id, Episode.sampling, Episode.state, Episode.end_reason),
    Episode.reported_reason,
    REACHED.label("reached"),
    case(
        (Episode.start_version_id.is_(None), GROUP_VERSION),
        (Episode.version_rule.in_((VersionRule.LEASH, VersionRule.PIN)), Episode.start_version_id),
    ).label("own_version_id"),
    case((Episode.version_rule == VersionRule.LEASH, Episode.max_staleness)).label("max_staleness"),
    case((Episode.start_version_id.is_not(None), Episode.version_rule)).label("version_rule"),
    Episode.service_tier,
)

# Built once, as every chat of an episode executes them.
SELECT_STATE = select(*STATE_COLUMNS).where(
    Episode.id == bindparam("episode_id"), Episode.project_id == bindparam("project_id")
)
EPISODE_IDS: BindParameter[Sequence[str]] = bindparam("episode_ids", expanding=True)
LOCK_EPISODES = (
    select(Episode.id, Episode.state, Episode.end_reason, Episode.reported_reason)
    .add_columns(Episode.max_turns, Episode.start_version_id)
    .where(Episode.id.in_(EPISODE_IDS))
    .order_by(Episode.id)
    .with_for_update(key_share=True)
)
SELECT_LAST_STEPS = (
    select(Turn.episode_id, func.max(Turn.episode_step))
    .where(Turn.episode_id.in_(EPISODE_IDS))
    .group_by(Turn.episode_id)
)
SELECT_NUM_COUNTED = select(func.count(Turn.episode_step.distinct())).where(
    Turn.episode_id == bindparam("episode_id"), IS_COUNTED
)


async def require_open(db: Database, project_id: str, episode_id: str, param: str) -> OpenEpisode:
    """Return the episode if it admits another chat; end it first if it has reached a limit.

    Raises NotFound for an episode that the project does not have, Conflict for one that has ended.
    """
    values = {"episode_id": episode_id, "project_id": project_id}
    row = await db.run_read(lambda connection: connection.execute(SELECT_STATE, values).one_or_none())
    if row is None:
        raise NotFound(f"There is no episode '{episode_id}'.", param=param)
    return await _admit(db, row)


async def find_traced(db: Database, project_id: str, policy_id: str, trace_id: str) -> OpenEpisode | None:
    """Return the newest open episode of the policy that was created for this trace, or None.

    A trace may go on after its episode: once the end has been reported, its further chats are ordinary ones. Raises
    Conflict for one that a limit has ended, since its agent still asks for more.
    """
    of_trace = (Episode.project_id == project_id, Episode.trace_id == trace_id, Episode.policy_id == policy_id)
    open_first = case((Episode.state == EpisodeState.OPEN, 0), else_=1)
    query = select(*STATE_COLUMNS).where(*of_trace).order_by(open_first, Episode.created_at.desc(), Episode.id.desc())
    row = await db.run_read(lambda connection: connection.execute(query.limit(1)).one_or_none())
    if row is None or row.reported_reason is not None or row.end_reason in REPORTED_REASONS:  # old rows have no report
        return None
    return await _admit(db, row)


async def _admit(db: Database, row: Any) -> OpenEpisode:
    if row.state == EpisodeState.OPEN and row.reached is not None:
        await db.run_write(lambda connection: end_at_limit(connection, [row.id], EndReason(row.reached)))
    elif row.state == EpisodeState.OPEN:
        sampling = EpisodeSampling(row.sampling or EpisodeSampling.REQUEST)
        is_pinned = row.version_rule == VersionRule.PIN
        version = (row.own_version_id, row.max_staleness, is_pinned)
        return OpenEpisode(row.id, row.policy_id, sampling, *version, row.service_tier)
    raise episode_ended(row.id, row.end_reason or row.reached, row.reported_reason)


def episode_ended(episode_id: str, reason: str, reported_reason: str | None = None) -> Conflict:
    """Return the error for a chat in an episode that has ended. A newer release may have stored other reasons."""
    is_limit = reported_reason is None and reason in LIMITS
    why = LIMITS[reason] if is_limit else f"it was reported as {reported_reason or reason}"
    message = f"The episode '{episode_id}' has ended: {why}. Create another one with POST /v1/episodes."
    return Conflict(message, code=f"episode_{reason}" if is_limit else "episode_ended")


def end_at_limit(connection: Connection, episode_ids: Sequence[str], reason: EndReason) -> int:
    """End those of the episodes that are open. Returns their number."""
    is_open = (Episode.id.in_(episode_ids), Episode.state == EpisodeState.OPEN)
    values = {"state": EpisodeState.ENDED, "end_reason": reason, "ended_at": now()}
    count = int(connection.execute(update(Episode).where(*is_open).values(values)).rowcount)
    if count:
        enqueue_after_commit(connection, "curate")  # feedback on it has waited
    return count


async def end_expired(db: Database) -> int:
    """End the open episodes whose time is over, in one transaction. Returns their number."""

    def end(connection: Connection) -> int:
        return sum(end_at_limit(connection, ids, reason) for reason, ids in found.items())

    reason = case(*[(condition, reason.value) for condition, reason in IS_EXPIRED], else_=null()).label("reason")
    is_expired = or_(*[condition for condition, _ in IS_EXPIRED])
    query = select(Episode.id, reason).where(Episode.state == EpisodeState.OPEN, is_expired)
    rows = await db.run_read(lambda connection: connection.execute(query.order_by(Episode.id).limit(MAX_ENDED)).all())
    found: dict[EndReason, list[str]] = {}
    for row in rows:
        found.setdefault(EndReason(row.reason), []).append(row.id)
    return await db.run_write(end) if found else 0


def admit_turns(connection: Connection, completions: Sequence[Sequence[NewTurn]]) -> list[int | AttuneError | None]:
    """Return, for the turns of each completion, their number in their episode, or why the episode takes none.

    Turns outside of an episode have no number.

    The lock on an episode's row, which its end takes too, makes the limit on turns exact, and guarantees that an
    episode which has ended gets no further turn.
    """
    ids = {id for turns in completions if (id := turns[0].episode_id) is not None}
    if not ids:
        return [None] * len(completions)
    values = {"episode_ids": list(ids)}
    episodes = {row.id: row for row in connection.execute(LOCK_EPISODES, values)}
    steps = {row[0]: row[1] or 0 for row in connection.execute(SELECT_LAST_STEPS, values)}
    num_admitted: Counter[str] = Counter()
    admissions: list[int | AttuneError | None] = []
    for turns in completions:
        id = turns[0].episode_id
        if id is None:
            admissions.append(None)
            continue
        episode = episodes.get(id)
        step = steps.get(id, 0) + 1
        if episode is None:
            admissions.append(NotFound(f"There is no episode '{id}'."))
        elif episode.state != EpisodeState.OPEN:
            admissions.append(episode_ended(id, episode.end_reason, episode.reported_reason))
        elif _is_used_up(connection, episode, step, num_admitted[id]):
            end_at_limit(connection, [id], EndReason.MAX_TURNS)
            admissions.append(episode_ended(id, EndReason.MAX_TURNS))
        else:
            steps[id] = step
            num_admitted[id] += 1
            admissions.append(step)
            if episode.start_version_id is None and step == 1:
                start = update(Episode).where(Episode.id == id)
                connection.execute(start.values(start_version_id=turns[0].version_id))
    return admissions


def _is_used_up(connection: Connection, episode: AnyRow, step: int, num_admitted: int) -> bool:
    """Return whether an episode takes no turn with this number. `num_admitted`: turns that are not yet recorded."""
    if episode.max_turns is None or step <= episode.max_turns:
        return False
    num_counted = connection.scalar(SELECT_NUM_COUNTED, {"episode_id": episode.id}) or 0
    return bool(num_counted + num_admitted >= episode.max_turns)
