"""Reads the trees of episodes: of those that turns belong to, and of the other episodes of their groups."""

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from itertools import groupby

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from app.core.database import chunked
from app.core.rows import AnyRow
from app.episodes import graph
from app.models import Episode, Turn
from app.training.episode_groups import key_of_group
from workers.feedback import signals
from workers.feedback.episode_trees import EpisodeTree
from workers.feedback.policy_configs import PolicyConfigs
from workers.feedback.signals import FinishedTurn


async def read_trees(session: AsyncSession, turns: Sequence[FinishedTurn], configs: PolicyConfigs) -> list[EpisodeTree]:
    """Return the trees of the episodes of these turns, and of the other episodes of their groups.

    Those are episodes of policies that credit turns by returns, or that compare the episodes of a group. Of a very long
    episode these are the latest MAX_SERIES_TURNS turns; earlier ones have their own rewards.
    """
    by_return = {id for id, config in configs.rewards.items() if config.episode_credit == "return"}
    policies = {
        turn.episode_id: turn.policy_id
        for turn in turns
        if turn.episode_id is not None and turn.policy_id in by_return | configs.compare_episodes
    }
    episodes = await _read_episodes(session, policies, configs.compare_episodes)
    compared = {
        episode.id: episode.policy_id in configs.compare_episodes and episode.group_id is not None
        for episode in episodes
    }
    wanted = [one for one in episodes if compared[one.id] or policies.get(one.id, one.policy_id) in by_return]
    pairs = {(episode.project_id, episode.id) for episode in wanted}
    chats: dict[str | None, list[FinishedTurn]] = defaultdict(list)
    for turn in await signals.read_series(session, "episode", pairs):
        chats[turn.episode_id].append(turn)
    policy_of = {episode.id: policies.get(episode.id, episode.policy_id) for episode in wanted}
    of_policy = {id: [turn for turn in chats[id] if turn.policy_id == policy_id] for id, policy_id in policy_of.items()}
    rows = await _read_rows(session, [turn.id for found in of_policy.values() for turn in found])
    return [
        _build_tree(one, policy_of[one.id], of_policy[one.id], rows.get(one.id, ()), is_compared=compared[one.id])
        for one in wanted
    ]


async def _read_episodes(
    session: AsyncSession, ids: Collection[str], compare_episodes: Collection[str]
) -> list[Episode]:
    """Return these episodes and, where their policy compares, the others of their groups, in the order of their ids."""
    found: dict[str, Episode] = {}
    for chunk in chunked(ids):
        found |= {one.id: one for one in await session.scalars(select(Episode).where(Episode.id.in_(chunk)))}
    groups: dict[str, set[str]] = defaultdict(set)
    for episode in found.values():
        if episode.group_id is not None and episode.policy_id in compare_episodes:
            groups[episode.project_id].add(episode.group_id)
    for project_id, names in sorted(groups.items()):
        for chunk in chunked(names):
            of_groups = (Episode.project_id == project_id, Episode.group_id.in_(chunk))
            query = select(Episode).where(*of_groups, Episode.policy_id.in_(compare_episodes))
            found |= {one.id: one for one in await session.scalars(query)}
    return sorted(found.values(), key=lambda episode: episode.id)


async def _read_rows(session: AsyncSession, turn_ids: Collection[str]) -> Mapping[str, Sequence[AnyRow]]:
    """Return what the graphs of these turns' episodes are built from, in the order of the steps, by episode."""
    rows: list[AnyRow] = []
    for chunk in chunked(turn_ids):
        query = select(*graph.COLUMNS, Turn.episode_id).where(Turn.id.in_(chunk))
        rows += (await session.execute(query)).all()
    rows.sort(key=lambda row: (row.episode_id, row.episode_step, row.choice_index, row.id))
    return {id: list(found) for id, found in groupby(rows, lambda row: str(row.episode_id))}


def _build_tree(
    episode: Episode, policy_id: str, turns: Sequence[FinishedTurn], rows: Sequence[AnyRow], *, is_compared: bool
) -> EpisodeTree:
    shown = graph.build_graph(rows)
    off_path = graph.find_off_path(rows, shown)
    by_id = {turn.id: turn for turn in turns}
    parents = {turn.id: turn.parent_turn_id for turn in shown}
    is_grouped = is_compared and episode.group_id is not None
    group = key_of_group(episode.group_id, episode.start_version_id) if is_grouped and episode.group_id else None
    return EpisodeTree(policy_id, episode, [by_id[turn.id] for turn in shown], parents, off_path, group)
