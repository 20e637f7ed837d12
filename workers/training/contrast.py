"""Whether the samples that wait have rewards that differ. Without that there is no batch, and none has to be ranked."""

from typing import NamedTuple

from sqlalchemy import ColumnElement, select, union_all
from sqlalchemy.ext.asyncio import AsyncSession

from alignment.config.algorithm import UpdateConfig
from alignment.tolerance import exceeds
from app.models import Sample
from app.training import sample_conditions
from app.training.fruitless_looks import Look
from app.training.sample_columns import is_open

MAX_GROUPS = 1000  # with samples that have changed; where there are more, all are read


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
    group, read_at = sample_conditions.group_key(), look.time
    conditions: list[ColumnElement[bool]] = [*is_own_open]
    last = await look.last_without_contrast(session)
    if last is not None:
        changed = select(group).where(*is_own_open, Sample.changed_at >= last.changed_since)
        keys = set(await session.scalars(changed.limit(MAX_GROUPS + 1)))
        if len(keys) <= MAX_GROUPS:
            # By primary keys alone: SQLite would read all samples of the policy for an OR.
            alone = select(Sample.turn_id).where(Sample.turn_id.in_(keys))
            grouped = select(Sample.turn_id).where(*is_own_open, Sample.group_id.in_(keys))
            conditions = [Sample.turn_id.in_(union_all(alone, grouped)), is_open()]
            read_at = last.read_at
    having = sample_conditions.rewards_differ(algorithm.min_contrast)
    differing = select(group).where(*conditions).group_by(group).having(having).limit(1)
    exists = await session.scalar(differing) is not None
    return Contrast(exists, None if exists else read_at)
