"""Samples with rewards of blocked and of quarantined raters: kept out of the next batch, and out of returned samples.

A block or a quarantine settles the samples that are open (`app.raters.service`). It passes over those that another
transaction holds, those in batches, and rewards that no feedback lets curation compute again. Those are found here.
Rewards are locked before samples and feedback, as curation does, except that `set_aside` begins with locked samples:
its callers repeat a deadlock.
"""

from collections import defaultdict
from collections.abc import Collection
from typing import Any, NamedTuple

from sqlalchemy import or_, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from app.core.database import chunked
from app.core.jobs import enqueue_after_commit
from app.core.rows import AnySelect
from app.models import Feedback, Rater, RaterStanding, Reward, Sample, SampleRule, SampleState, Turn
from app.policies.locks import LockedPolicy
from app.raters.service import BLOCKED, read_feedback
from app.training.recomputation import request_recomputation


class BlockedTurns(NamedTuple):
    """The turns with a reward of a blocked rater: those without another reward that counts, and the others."""

    alone: set[str]
    shared: set[str]


class SetAside(NamedTuple):
    """How many samples were set aside, and the turns whose samples are to be computed at once, by the caller."""

    num_samples: int
    uncomputed: set[str]


class EpisodeKey(NamedTuple):
    project_id: str
    episode_id: str


async def set_aside(locked: LockedPolicy, turn_ids: Collection[str]) -> SetAside:
    """Take samples out of the next batch that have rewards of a rater who was blocked or quarantined.

    The block or the quarantine has passed over those that another transaction held, and over rewards that no feedback
    lets curation compute again: those of judges, of users' next messages. The samples of these turns are open and
    locked. Those of a quarantined rater wait for an admin. Those of a blocked rater alone are dropped; those that
    others have rated too, and those of a compared episode, are computed again: by curation, and not ready until then,
    or by the caller.
    """
    session = locked.session
    in_episodes = await _read_episodes(session, turn_ids)
    missed, affected_episodes = await _find_missed(session, turn_ids, set(in_episodes.values()))
    blocked = await find_blocked(session, missed)
    of_episodes = {turn_id for turn_id, episode in in_episodes.items() if episode in affected_episodes}
    dropped = blocked.alone.intersection(turn_ids) - of_episodes
    quarantined = await find_quarantined(session, set(turn_ids) - dropped)
    shared = blocked.shared.intersection(turn_ids) | of_episodes
    await _change(session, dropped, state=SampleState.DROPPED, rule=SampleRule.RATER_BLOCKED, reason=BLOCKED)
    for reason in sorted(set(quarantined.values())):
        turns = [turn_id for turn_id, its_reason in quarantined.items() if its_reason == reason]
        await _change(session, turns, state=SampleState.QUARANTINED, reason=reason)
    _, computed = await read_feedback(session, shared)
    await _remove_weights(session, missed)
    if shared:
        await request_recomputation(session, shared)
        enqueue_after_commit(session, "curate")
    return SetAside(len(dropped | shared | quarantined.keys()), shared - computed)


async def _find_missed(
    session: AsyncSession, turn_ids: Collection[str], episodes: Collection[EpisodeKey]
) -> tuple[set[str], set[EpisodeKey]]:
    """Return the turns that a blocked rater's reward still counts for, and the episodes to be computed without one.

    The turns are those with these ids, and all turns of these episodes. An episode is also computed again where such a
    reward has lost its weight on another turn, and its feedback has not been processed since.
    """
    missed: set[str] = set()
    affected: set[EpisodeKey] = set()
    for chunk in chunked(turn_ids):
        rewards = _rewards_by(RaterStanding.BLOCKED, Reward.turn_id).where(Reward.turn_id.in_(chunk), Reward.weight > 0)
        missed.update(await session.scalars(rewards))
    for project_id, ids in _by_project(episodes).items():
        for chunk in chunked(ids):
            in_episodes = (Turn.project_id == project_id, Turn.episode_id.in_(chunk))
            rewards = _rewards_by(RaterStanding.BLOCKED, Turn.episode_id, Reward.turn_id, Reward.weight)
            rewards = rewards.outerjoin(Feedback, Feedback.seq == Reward.feedback_seq)
            rewards = rewards.where(*in_episodes, or_(Reward.weight > 0, Feedback.processed.is_(False)))
            for episode_id, turn_id, weight in await session.execute(rewards):
                affected.add(EpisodeKey(project_id, episode_id))
                if weight > 0:
                    missed.add(turn_id)
    return missed, affected


async def _change(session: AsyncSession, turn_ids: Collection[str], **values: Any) -> None:
    for chunk in chunked(turn_ids):
        await session.execute(update(Sample).where(Sample.turn_id.in_(chunk)).values(**values))


async def compute_again(session: AsyncSession, returned: Collection[str], blocked: BlockedTurns) -> None:
    """Let the rewards of returned samples be computed again, without those of blocked raters.

    What no feedback lets curation compute keeps its reward and its raters' weights until a batch is to have it:
    `set_aside` finds it by them.
    """
    _, computed = await read_feedback(session, blocked.shared)
    await _remove_weights(session, blocked.alone | computed | (blocked.shared - set(returned)))
    await request_recomputation(session, returned)
    enqueue_after_commit(session, "curate", "assemble")


async def find_blocked(session: AsyncSession, turn_ids: Collection[str]) -> BlockedTurns:
    """Lock the rewards of blocked raters on these turns, and return the turns."""
    blocked = BlockedTurns(set(), set())
    for chunk in chunked(sorted(turn_ids)):
        rewards = _rewards_by(RaterStanding.BLOCKED, Reward.id, Reward.turn_id).where(Reward.turn_id.in_(chunk))
        rewards = rewards.order_by(Reward.turn_id, Reward.source).with_for_update(of=Reward)
        found = (await session.execute(rewards)).all()
        others = (Reward.turn_id.in_({row.turn_id for row in found}), Reward.id.not_in([row.id for row in found]))
        shared = set(await session.scalars(select(Reward.turn_id).where(*others, Reward.weight > 0)))
        blocked.shared.update(shared)
        blocked.alone.update({row.turn_id for row in found} - shared)
    return blocked


async def _remove_weights(session: AsyncSession, turn_ids: Collection[str]) -> None:
    """Take the weight from the rewards of blocked raters on these turns. The rewards are locked."""
    for chunk in chunked(sorted(turn_ids)):
        rewards = _rewards_by(RaterStanding.BLOCKED, Reward.id).where(Reward.turn_id.in_(chunk))
        await session.execute(update(Reward).where(Reward.id.in_(rewards)).values(weight=0.0))


async def find_quarantined(session: AsyncSession, turn_ids: Collection[str]) -> dict[str, str]:
    """Return the turns with a reward of a quarantined rater, each with the reason of the quarantine.

    A compared episode has the rewards of all its turns. Of several raters, the first by name gives the reason.
    """
    quarantined: dict[str, str] = {}
    for chunk in chunked(turn_ids):
        rewards = _rewards_by(RaterStanding.QUARANTINED, Reward.turn_id, Rater.reason)
        own = rewards.where(Reward.turn_id.in_(chunk)).order_by(Reward.turn_id, Rater.name)
        for turn_id, reason in await session.execute(own):
            quarantined.setdefault(turn_id, reason or RaterStanding.QUARANTINED)
    in_episodes = await _read_episodes(session, turn_ids)
    reasons: dict[EpisodeKey, str] = {}
    for project_id, ids in _by_project(set(in_episodes.values())).items():
        for chunk in chunked(ids):
            rewards = _rewards_by(RaterStanding.QUARANTINED, Turn.episode_id, Rater.name, Rater.reason).distinct()
            of_episodes = rewards.where(Turn.project_id == project_id, Turn.episode_id.in_(chunk))
            for episode_id, _, reason in await session.execute(of_episodes.order_by(Turn.episode_id, Rater.name)):
                reasons.setdefault(EpisodeKey(project_id, episode_id), reason or RaterStanding.QUARANTINED)
    for turn_id, episode in in_episodes.items():
        if episode in reasons:
            quarantined.setdefault(turn_id, reasons[episode])
    return quarantined


async def _read_episodes(session: AsyncSession, turn_ids: Collection[str]) -> dict[str, EpisodeKey]:
    """Return the episodes of those of the turns whose samples are compared as parts of one."""
    episodes: dict[str, EpisodeKey] = {}
    for chunk in chunked(turn_ids):
        query: AnySelect = select(Sample.turn_id, Turn.project_id, Sample.episode_id)
        query = query.join(Turn, Turn.id == Sample.turn_id)
        is_compared = (Sample.turn_id.in_(chunk), Sample.episode_id.is_not(None))
        for turn_id, project_id, episode_id in await session.execute(query.where(*is_compared)):
            episodes[turn_id] = EpisodeKey(project_id, episode_id)
    return episodes


def _by_project(episodes: Collection[EpisodeKey]) -> dict[str, list[str]]:
    """Return the ids of the episodes of each project. SQLite uses no index for a condition on pairs of columns."""
    ids: defaultdict[str, list[str]] = defaultdict(list)
    for project_id, episode_id in sorted(episodes):
        ids[project_id].append(episode_id)
    return ids


def _rewards_by(standing: RaterStanding, *columns: Any) -> AnySelect:
    """Return a query of the rewards of raters with this standing, with their turns."""
    is_rater = (Rater.project_id == Turn.project_id) & (Rater.name == Reward.rater)
    rewards = select(*columns).select_from(Reward).join(Turn, Turn.id == Reward.turn_id)
    return rewards.join(Rater, is_rater).where(Rater.standing == standing)
