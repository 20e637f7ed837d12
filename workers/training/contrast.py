"""Whether the samples that wait have rewards that differ. Without that there is no batch, and none has to be ranked.

For an algorithm that learns from groups, each sample is compared with its group once, when it has changed: it keeps by
how much the rewards of the group differed (`Sample.group_contrast`), with its own `changed_at` at that time
(`compared_at`). Of two samples of a group, the one that was compared later has seen the other one, so where rewards
differ, a sample says so or waits to be compared. A sample that leaves the group makes the difference smaller, so what
the samples say is checked before it counts.
"""

import math
from collections.abc import Collection, Mapping
from enum import Enum
from typing import cast

from sqlalchemy import ColumnElement, Table, bindparam, select, text, update
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import aliased

from alignment.config.algorithm import UpdateConfig
from alignment.tolerance import TOLERANCE, exceeds
from app.core.planner import read_by
from app.models import HAS_CONTRAST, IS_UNCOMPARED, Sample
from app.training import sample_conditions
from app.training.sample_columns import is_open

SAMPLES = cast(Table, Sample.__table__)
NUM_CHECKED = 20  # samples of groups with contrast that are checked at once


class Contrast(Enum):
    """Whether rewards differ."""

    EXISTS = "exists"
    MISSING = "missing"
    UNKNOWN = "unknown"  # yet: some samples were compared, and others follow


async def find_contrast(session: AsyncSession, policy_id: str, algorithm: UpdateConfig, limit: int) -> Contrast:
    """Return whether the open samples, usable or not, have rewards that differ; with groups, those of one group.

    Corrected replies need no contrast. Without groups these are three looks into an index. With groups, at most `limit`
    samples of the locked policy are compared with theirs, by a few looks into an index for each.
    """
    is_own_open = (Sample.policy_id == policy_id, is_open())
    corrected = select(Sample.turn_id).where(*is_own_open, Sample.is_corrected.is_(True)).limit(1)
    if await session.scalar(read_by(corrected, Sample, "ix_samples_corrected")) is not None:
        return Contrast.EXISTS
    if not algorithm.needs_groups:
        lowest, highest = [
            await session.scalar(select(Sample.reward).where(*is_own_open).order_by(order).limit(1))
            for order in (Sample.reward.asc(), Sample.reward.desc())
        ]
        is_found = lowest is not None and highest is not None and exceeds(highest, lowest, algorithm.min_contrast)
        return Contrast.EXISTS if is_found else Contrast.MISSING
    known = await _check_known(session, policy_id, algorithm.min_contrast, limit)
    if known != Contrast.MISSING:
        return known
    turn_ids = await _list_uncompared(session, policy_id, limit)
    contrasts = await _read_contrasts(session, await _lock(session, turn_ids))
    await _record(session, contrasts, are_locked=True)
    if any(exceeds(contrast, 0.0, algorithm.min_contrast) for contrast in contrasts.values()):
        return Contrast.EXISTS
    return Contrast.UNKNOWN if len(turn_ids) == limit else Contrast.MISSING


async def _check_known(session: AsyncSession, policy_id: str, min_contrast: float, limit: int) -> Contrast:
    """Check the samples whose groups had contrast when they were compared, until one of them still has it."""
    has_contrast = (text(HAS_CONTRAST), Sample.group_contrast > min_contrast + TOLERANCE)
    known = select(Sample.turn_id).where(Sample.policy_id == policy_id, is_open(), *has_contrast)
    known = known.order_by(Sample.group_contrast.desc(), Sample.turn_id.desc()).limit(NUM_CHECKED)
    for _ in range(0, limit, NUM_CHECKED):
        turn_ids = list(await session.scalars(read_by(known, Sample, "ix_samples_contrast")))
        contrasts = await _read_contrasts(session, turn_ids)
        if any(exceeds(contrast, 0.0, min_contrast) for contrast in contrasts.values()):
            return Contrast.EXISTS
        await _record(session, contrasts, are_locked=False)
        if len(turn_ids) < NUM_CHECKED:
            return Contrast.MISSING
    return Contrast.UNKNOWN


async def _list_uncompared(session: AsyncSession, policy_id: str, limit: int) -> list[str]:
    """Return the turns of the first samples that have changed since they were compared."""
    uncompared = select(Sample.turn_id).where(Sample.policy_id == policy_id, is_open(), text(IS_UNCOMPARED))
    uncompared = uncompared.order_by(Sample.turn_id).limit(limit)
    return list(await session.scalars(read_by(uncompared, Sample, "ix_samples_uncompared")))


async def _lock(session: AsyncSession, turn_ids: Collection[str]) -> list[str]:
    """Lock the samples of these turns that are open. Return their turns.

    While they are locked they do not change, so what is then read of their groups belongs to their `changed_at`.
    """
    samples = select(Sample.turn_id).where(Sample.turn_id.in_(turn_ids), is_open()).order_by(Sample.turn_id)
    return list(await session.scalars(samples.with_for_update()))


async def _read_contrasts(session: AsyncSession, turn_ids: Collection[str]) -> dict[str, float]:
    """Return by how much the rewards of the groups of these open samples differ, by turn."""
    query = select(Sample.turn_id, *_bounds_of_group()).where(Sample.turn_id.in_(turn_ids)).order_by(Sample.turn_id)
    contrasts: dict[str, float] = {}
    for turn_id, *bounds in await session.execute(query) if turn_ids else ():
        rewards = [bound for bound in bounds if bound is not None]
        contrasts[turn_id] = max(0.0, max(rewards) - min(rewards)) if rewards else 0.0  # 0 if it is not a number, too
    return contrasts


async def _record(session: AsyncSession, contrasts: Mapping[str, float], *, are_locked: bool) -> None:
    """Record these contrasts; of samples that are locked, that they have been compared as they are now."""
    values = [{"of_turn": turn_id, "contrast": contrast} for turn_id, contrast in contrasts.items()]
    columns = {"group_contrast": bindparam("contrast"), "changed_at": SAMPLES.c.changed_at}
    if are_locked:
        columns["compared_at"] = SAMPLES.c.changed_at
    if values:
        await session.execute(update(SAMPLES).where(SAMPLES.c.turn_id == bindparam("of_turn")).values(columns), values)


def _bounds_of_group() -> list[ColumnElement[float]]:
    """Return the lowest and the highest compared rewards of a Sample's group, as SQL expressions; null where none is.

    Each is the first or the last one in an index: of the samples without the reward of an episode, of those with it,
    and of the sample that is a group by its turn.
    """
    one, key = aliased(Sample), sample_conditions.group_key()
    in_group = (one.policy_id == Sample.policy_id, is_open(one), one.group_id == key)
    alone = (one.turn_id == key, one.group_id.is_(None), one.policy_id == Sample.policy_id, is_open(one))
    reward = sample_conditions.compared_reward(one)
    bounds = [select(reward).where(*alone)]
    has_episode_reward = one.episode_reward >= -math.inf  # not `is not null`: SQLite reads a range by the index
    for condition in (one.episode_reward.is_(None), has_episode_reward):
        # PostgreSQL needs both columns to read the bound from the index, although the first one is null in one case.
        for order in ((one.episode_reward.asc(), one.reward.asc()), (one.episode_reward.desc(), one.reward.desc())):
            bound = select(reward).where(*in_group, condition).order_by(*order).limit(1)
            bounds.append(read_by(bound, one, "ix_samples_rewards_of_groups"))
    return [bound.correlate(Sample).scalar_subquery() for bound in bounds]
