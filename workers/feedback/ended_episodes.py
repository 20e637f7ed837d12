"""Ended episodes: the samples of their turns have waited for the end, and none may have feedback to be processed."""

from sqlalchemy import exists, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from app.core.settings import Settings
from app.models import Episode, EpisodeState, Policy, Turn, TurnState
from app.policies.overrides import effective_settings
from app.training.policy_config import effective_rewards
from workers.feedback.rewards import update_turn_samples
from workers.feedback.signals import read_series


async def find_ended(session: AsyncSession, limit: int) -> list[str]:
    """Return the ids of at most `limit` episodes whose end has not been processed, and whose turns have all ended."""
    is_running = exists().where(Turn.episode_id == Episode.id, Turn.state == TurnState.OPEN)
    query = select(Episode.id).where(Episode.state == EpisodeState.ENDED, ~Episode.processed, ~is_running)
    return list(await session.scalars(query.order_by(Episode.ended_at, Episode.id).limit(limit)))


async def process_end(session: AsyncSession, episode_id: str, settings: Settings) -> None:
    """Update the samples that wait for the end of an episode: those of its turns, and of the others in its group."""
    episode = await session.get_one(Episode, episode_id)
    policy = await session.get_one(Policy, episode.policy_id)
    waiting = set[str]()
    if effective_rewards(policy, settings).episode_credit == "return":
        waiting.add(episode.id)
    if episode.group_id is not None and effective_settings(policy, settings).algorithm.compares_episodes:
        in_group = (Episode.project_id == episode.project_id, Episode.group_id == episode.group_id)
        waiting.update(await session.scalars(select(Episode.id).where(*in_group)))
    if waiting:
        turns = await read_series(session, "episode", [(episode.project_id, id) for id in waiting])
        await update_turn_samples(session, [turn.id for turn in turns], settings)
    await mark_processed(session, episode_id)


async def mark_processed(session: AsyncSession, episode_id: str) -> None:
    await session.execute(update(Episode).where(Episode.id == episode_id).values(processed=True))
