"""Whether the samples that wait have rewards that differ. Without that there is no batch, and none has to be ranked."""

from collections import defaultdict
from collections.abc import Collection
from typing import NamedTuple

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from alignment.config.algorithm import UpdateConfig
from alignment.tolerance import exceeds
from app.models import Sample, SampleState
from app.training import sample_conditions
from app.training.fruitless_looks import Look
from app.training.sample_columns import is_open

MAX_CHANGED = 1000  # samples; where more have changed, all are read


class Contrast(NamedTuple):
    """Whether rewards differ. If those of no group do, `read_at` is when all open samples were last read."""

    exists: bool
    read_at: float | None = None


async def find_contrast(session: AsyncSession, look: Look, algorithm: UpdateConfig) -> Contrast:
    """Return whether the open samples, usable or not, have rewards that differ; with groups, those of one group.

    Corrected replies need no contrast. Without groups these are three looks into an index. With groups each sample is
    read, and then for ALL_GROUPS_SECONDS only the groups of those that have changed.
    """
    is_own_open = (Sample.policy_id == look.policy_id, is_open())
    if await session.scalar(select(Sample.turn_id).where(*is_own_open, Sample.is_corrected).limit(1)) is not None:
        return Contrast(True)
    if not algorithm.needs_groups:
        lowest, highest = [
            await session.scalar(select(Sample.reward).where(*is_own_open).order_by(order).limit(1))
            for order in (Sample.reward.asc(), Sample.reward.desc())
        ]
        return Contrast(lowest is not None and highest is not None and exceeds(highest, lowest, algorithm.min_contrast))
    last = await look.last_without_contrast(session)
    group = sample_conditions.group_key()
    if last is not None:
        changed = select(group).where(*is_own_open, Sample.changed_at >= last.changed_since)
        keys = list(await session.scalars(changed.order_by(Sample.changed_at, Sample.turn_id).limit(MAX_CHANGED + 1)))
        if len(keys) <= MAX_CHANGED:
            exists = await _have_contrast(session, look.policy_id, set(keys), algorithm)
            return Contrast(exists, None if exists else last.read_at)
    having = sample_conditions.rewards_differ(algorithm.min_contrast)
    differing = select(group).where(*is_own_open).group_by(group).having(having).limit(1)
    exists = await session.scalar(differing) is not None
    return Contrast(exists, None if exists else look.time)


async def _have_contrast(session: AsyncSession, policy_id: str, keys: Collection[str], algorithm: UpdateConfig) -> bool:
    """Return whether the open samples of one of the groups with these keys have rewards that differ.

    A sample that has no group is one of its own, and others may be in it by their group id.
    """
    in_group = (Sample.policy_id == policy_id, is_open(), Sample.group_id.in_(keys))
    alone = (Sample.turn_id.in_(keys), Sample.group_id.is_(None), Sample.state == SampleState.OPEN)
    rewards: dict[str, list[float]] = defaultdict(list)
    for conditions in (in_group, alone):  # two statements: each reads by an index of its own
        query = select(sample_conditions.group_key(), sample_conditions.compared_reward()).where(*conditions)
        for key, reward in set(await session.execute(query)):  # in any order: SQLite would read all for a complete one
            rewards[key].append(reward)
    return any(exceeds(max(values), min(values), algorithm.min_contrast) for values in rewards.values())
