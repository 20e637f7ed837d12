"""Statistics of versions: their replies, people's votes on them, rewards by source and how soon they answered.

But for the delay, they are of each version's newest MAX_TURNS replies to chats, which bounds the duration.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from sqlalchemy import ColumnElement, and_, func, or_, select
from sqlalchemy.ext.asyncio import AsyncSession

from alignment.signals.proportions import Share
from app.core.planner import prefer_indexes
from app.core.rows import AnySelect
from app.models import Batch, BatchTurn, Feedback, Origin, Reward, Turn, TurnState, Version
from app.raters.approval import approval_fields, count_columns, is_vote

MAX_TURNS = 10_000  # replies of a version that its statistics are of


class VersionStatistics(NamedTuple):
    """What the list of versions shows of one; lengths are in tokens.

    The alignment delay is the time in seconds from the last feedback in the version's batch to its first reply.
    """

    turns: int
    mean_length: float
    rated: int
    approval: float | None
    approval_low: float | None
    approval_high: float | None
    alignment_delay: float | None


class Replies(NamedTuple):
    """The finished replies of a version."""

    num_replies: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    first_at: float | None = None

    @property
    def mean_length(self) -> float:
        return self.output_tokens / self.num_replies if self.num_replies else 0.0


class Votes(NamedTuple):
    """People's votes on a version's replies, and the number of people."""

    share: Share = Share(0, 0)
    raters: int = 0


class SourceMean(NamedTuple):
    """The rewards of one reward source: their number and their mean."""

    num_rewards: int
    mean: float


class CountedTurns(NamedTuple):
    """Which turns are counted: a condition, and since when, for each version with more than MAX_TURNS of them."""

    condition: ColumnElement[bool]
    since: Mapping[str, float]


async def find_counted_turns(session: AsyncSession, versions: Sequence[Version]) -> CountedTurns:
    """Return the condition that a turn is a chat's, and among the newest of one of the versions."""
    created_at = select(Turn.created_at).where(Turn.version_id == Version.id).order_by(Turn.created_at.desc())
    oldest = created_at.limit(1).offset(MAX_TURNS - 1).correlate(Version).scalar_subquery()
    rows = await session.execute(select(Version.id, oldest).where(Version.id.in_([version.id for version in versions])))
    since = {id: oldest_at for id, oldest_at in rows if oldest_at is not None}
    complete = Turn.version_id.in_([version.id for version in versions if version.id not in since])
    newest = [and_(Turn.version_id == id, Turn.created_at >= oldest_at) for id, oldest_at in since.items()]
    return CountedTurns(and_(or_(complete, *newest), Turn.origin == Origin.CHAT), since)


async def read_replies(session: AsyncSession, counted: CountedTurns) -> dict[str, Replies]:
    """Return the finished replies by version id; versions without one are left out."""
    rows: Any = await session.execute(
        select(
            Turn.version_id,
            func.count(),
            func.coalesce(func.sum(Turn.num_prompt_tokens), 0),
            func.coalesce(func.sum(Turn.num_output_tokens), 0),
            func.min(Turn.finished_at),
        )
        .where(counted.condition, Turn.state == TurnState.DONE)
        .group_by(Turn.version_id)
    )
    replies = {id: Replies(count, int(prompt), int(output), first_at) for id, count, prompt, output, first_at in rows}
    for id in counted.since.keys() & replies.keys():  # the first reply is not among the newest ones
        replies[id] = replies[id]._replace(first_at=await session.scalar(_select_first_reply(id)))
    return replies


async def read_votes(session: AsyncSession, counted: CountedTurns) -> dict[str, Votes]:
    """Return people's votes by version id; versions without one are left out."""
    rows: Any = await session.execute(
        select(Turn.version_id, *count_columns())
        .join(Turn, Turn.id == Reward.turn_id)
        .where(counted.condition, is_vote())
        .group_by(Turn.version_id)
    )
    return {id: Votes(Share(int(up), count), raters) for id, count, up, raters in rows}


async def read_reward_means(session: AsyncSession, counted: CountedTurns) -> dict[str, dict[str, SourceMean]]:
    """Return the rewards by version id and reward source; "explicit" is the feedback of people and programs."""
    means: dict[str, dict[str, SourceMean]] = defaultdict(dict)
    rows = await session.execute(
        select(Turn.version_id, Reward.reward_source, func.count(), func.avg(Reward.value))
        .join(Turn, Turn.id == Reward.turn_id)
        .where(counted.condition)
        .group_by(Turn.version_id, Reward.reward_source)
        .order_by(Reward.reward_source)
    )
    for id, source, count, mean in rows:
        means[id][source] = SourceMean(count, float(mean))
    return means


async def read_statistics(session: AsyncSession, versions: Sequence[Version]) -> dict[str, VersionStatistics]:
    """Return the statistics by version id."""
    await prefer_indexes(session)
    counted = await find_counted_turns(session, versions)
    replies, votes = await read_replies(session, counted), await read_votes(session, counted)
    last_feedback = await _read_last_feedback(session, versions)

    def measure(id: str) -> VersionStatistics:
        of_version = replies.get(id, Replies())
        has_delay = of_version.first_at is not None and id in last_feedback
        return VersionStatistics(
            turns=of_version.num_replies,
            mean_length=of_version.mean_length,
            **approval_fields(votes.get(id, Votes()).share)._asdict(),
            alignment_delay=(of_version.first_at or 0.0) - last_feedback[id] if has_delay else None,
        )

    return {version.id: measure(version.id) for version in versions}


async def _read_last_feedback(session: AsyncSession, versions: Sequence[Version]) -> dict[str, float]:
    """Return when the last feedback in each version's batch came, by version id."""
    batch_ids = [version.batch_id for version in versions if version.batch_id is not None]
    rows = await session.execute(
        select(Batch.version_id, func.max(Feedback.created_at))
        .join(BatchTurn, BatchTurn.batch_id == Batch.id)
        .join(Feedback, Feedback.turn_id == BatchTurn.turn_id)
        .where(Batch.id.in_(batch_ids), Feedback.created_at <= Batch.created_at)
        .group_by(Batch.version_id)
    )
    return {id: last_at for id, last_at in rows if id is not None}


def _select_first_reply(version_id: str) -> AnySelect:
    is_reply = (Turn.version_id == version_id, Turn.state == TurnState.DONE, Turn.origin == Origin.CHAT)
    return select(Turn.finished_at).where(*is_reply).order_by(Turn.created_at).limit(1)
