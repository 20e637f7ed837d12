"""Ended episodes: the samples of their turns have waited for the end, and none may have feedback to be processed."""

from collections import defaultdict
from collections.abc import Collection
from typing import NamedTuple

from sqlalchemy import ColumnElement, and_, bindparam, exists, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from app.core.settings import Settings
from app.models import Episode, EpisodeState, Policy, Turn, TurnState
from app.policies.overrides import effective_settings
from app.training.policy_config import effective_rewards
from workers.feedback import sample_groups
from workers.feedback.lost_attempts import is_lost
from workers.feedback.rewards import update_turn_samples
from workers.feedback.signals import read_series


class EndedEpisodes(NamedTuple):
    """The ids of episodes that have ended: `unaffected` ones, whose end changes no samples, and those whose samples are
    computed together, since they are in one group or alone."""

    unaffected: list[str]
    together: list[list[str]]


def is_unprocessed() -> ColumnElement[bool]:
    """Return the condition that an Episode has ended, and its end has not been processed."""
    # The value is in the text of the statement: only so does SQLite use the partial index.
    has_ended = Episode.state == bindparam(None, EpisodeState.ENDED.value, literal_execute=True)
    return and_(has_ended, ~Episode.processed)


async def find_ended(session: AsyncSession, settings: Settings, limit: int) -> EndedEpisodes:
    """Return at most `limit` episodes whose end has not been processed, and whose turns have all ended."""
    is_running = exists().where(Turn.episode_id == Episode.id, Turn.state == TurnState.OPEN)
    columns = (Episode.id, Episode.project_id, Episode.policy_id, Episode.group_id, is_lost().label("is_lost"))
    query = select(*columns).where(is_unprocessed(), ~is_running).order_by(Episode.ended_at, Episode.id)
    rows = (await session.execute(query.limit(limit))).all()
    policies = await session.scalars(select(Policy).where(Policy.id.in_({row.policy_id for row in rows})))
    by_return, compare = set[str](), set[str]()
    for policy in policies:
        if effective_rewards(policy, settings).episode_credit == "return":
            by_return.add(policy.id)
        if effective_settings(policy, settings).algorithm.compares_episodes:
            compare.add(policy.id)
    unaffected: list[str] = []
    together: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for row in rows:
        if row.group_id is not None and row.policy_id in compare:
            together[row.project_id, row.policy_id, row.group_id].append(row.id)
        elif row.policy_id in by_return or row.is_lost:
            together[(row.id,)].append(row.id)
        else:
            unaffected.append(row.id)
    return EndedEpisodes(unaffected, list(together.values()))


async def process_ends(session: AsyncSession, ids: Collection[str], settings: Settings) -> None:
    """Update the samples that wait for the ends of episodes, which are of one group if they are several.

    Those are the samples of their turns, and of the others in the group, which are computed with them. What changes an
    episode again, such as a report after a limit, waits for the mark, and takes it away then.
    """
    episode = await session.get_one(Episode, min(ids))
    turns = await read_series(session, "episode", {(episode.project_id, id) for id in ids})
    if not turns and episode.group_id is not None:  # one without chats: the others have waited for it
        in_group = (Episode.project_id == episode.project_id, Episode.group_id == episode.group_id)
        has_chats = exists().where(Turn.episode_id == Episode.id)
        other = await session.scalar(select(Episode.id).where(*in_group, has_chats).order_by(Episode.id).limit(1))
        turns = [] if other is None else await read_series(session, "episode", {(episode.project_id, other)})
    turn_ids = [turn.id for turn in turns]
    await sample_groups.lock_groups(session, turn_ids)  # first, as everywhere
    of_ends = select(Episode).where(Episode.id.in_(ids)).order_by(Episode.id)
    await session.scalars(of_ends.with_for_update(key_share=True).execution_options(populate_existing=True))
    await update_turn_samples(session, turn_ids, settings)
    await mark_processed(session, ids)


async def mark_unaffected(session: AsyncSession, ids: Collection[str]) -> None:
    """Mark episodes whose end changes no samples, but those that were reported as lost since that was read."""
    await session.execute(update(Episode).where(Episode.id.in_(ids), ~is_lost()).values(processed=True))


async def mark_processed(session: AsyncSession, ids: Collection[str]) -> None:
    await session.execute(update(Episode).where(Episode.id.in_(ids)).values(processed=True))
