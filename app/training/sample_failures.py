"""In how many quarantined batches samples were: counted when they have changed, not when they are read.

`Sample.num_failures` is known where `failures_counted_at` is `changed_at`, and where the sample has never returned: it
is 0 there. Who enters or leaves a batch changes, and a batch is settled before the next look at the samples. So the
assembly counts what has changed since, whichever release has changed it, and the others cost nothing.
"""

from sqlalchemy import ColumnElement, case, func, or_, select, text, update
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import aliased
from sqlalchemy.sql.elements import False_

from app.core.database import now
from app.core.planner import read_by
from app.core.settings import Settings
from app.models import HAS_FAILED, IS_UNCOUNTED, Batch, BatchState, BatchTurn, Policy, Sample
from app.training import sample_conditions
from app.training.sample_columns import is_open


async def count_failures(session: AsyncSession, policy_id: str, limit: int) -> int:
    """Count the failures of at most `limit` open samples of the locked policy, where they are not known.

    Returns how many samples these were.
    """
    is_uncounted = (is_open(), text(IS_UNCOUNTED))
    uncounted = select(Sample.turn_id).where(Sample.policy_id == policy_id, *is_uncounted)
    uncounted = read_by(uncounted.order_by(Sample.turn_id).limit(limit), Sample, "ix_samples_uncounted_failures")
    turn_ids = list(await session.scalars(uncounted))
    # Nothing that the assembly depends on has changed.
    values = {"num_failures": _count(), "failures_counted_at": Sample.changed_at, "changed_at": Sample.changed_at}
    if turn_ids:
        are_chosen = (Sample.turn_id.in_(turn_ids), *is_uncounted)
        await session.execute(update(Sample).where(*are_chosen).values(values))
    return len(turn_ids)


def _count() -> ColumnElement[int]:
    """Return the number of quarantined batches that a Sample was in; 0 if an update has succeeded with it."""
    num_quarantined, num_trained = [
        func.coalesce(func.sum(case((Batch.state == state, 1), else_=0)), 0)
        for state in (BatchState.QUARANTINED, BatchState.TRAINED)
    ]
    batches = select(case((num_trained > 0, 0), else_=num_quarantined)).join_from(
        BatchTurn, Batch, Batch.id == BatchTurn.batch_id
    )
    return batches.where(BatchTurn.turn_id == Sample.turn_id).correlate(Sample).scalar_subquery()


async def max_failures(session: AsyncSession, policy: Policy, settings: Settings) -> int:
    """Return how often the ready sample that failed most often has failed, of those that training may use; else 0.

    It is the first one in an index. The groups of no other samples are read.
    """
    is_allowed = await sample_conditions.allowed_samples(session, policy, settings)
    if isinstance(is_allowed, False_):  # SQLAlchemy would leave out the other conditions, which the index needs
        return 0
    query = select(Sample.num_failures).where(Sample.policy_id == policy.id, is_open(), text(HAS_FAILED))
    query = query.where(Sample.ready_at <= now(), is_allowed)
    if settings.algorithm.needs_groups:
        has_others = await _has_others(session, policy, settings)
        query = query.where(or_(sample_conditions.is_planned(), Sample.is_corrected, has_others))
    query = query.order_by(Sample.num_failures.desc()).limit(1)
    return await session.scalar(read_by(query, Sample, "ix_samples_failed")) or 0


async def _has_others(session: AsyncSession, policy: Policy, settings: Settings) -> ColumnElement[bool]:
    """Return the condition that a Sample is compared with another ready one of its group that training may use.

    It is that of `sample_conditions.is_learnable`, for few samples: it looks into indexes for each of them.
    """
    other = aliased(Sample)
    others_are_allowed = await sample_conditions.allowed_samples(session, policy, settings, other)
    differs = func.coalesce(other.episode_id, other.turn_id) != func.coalesce(Sample.episode_id, Sample.turn_id)
    is_ready = (is_open(other), other.ready_at <= now(), others_are_allowed, differs)
    key = sample_conditions.group_key()
    in_group = select(other.turn_id).where(other.policy_id == policy.id, other.group_id == key, *is_ready)
    in_group = read_by(in_group, other, "ix_samples_in_groups")
    alone = select(other.turn_id).where(other.turn_id == key, other.group_id.is_(None), *is_ready)
    return or_(*[others.correlate(Sample).exists() for others in (in_group, alone)])
