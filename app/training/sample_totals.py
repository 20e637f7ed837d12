"""Counts the samples that wait by policy and state, so that no page counts all of them.

`Sample.counted_state` is the state in which a SampleTotal counts the sample; it is empty if none does. What changes the
state of a sample leaves it as it is. Pages read the totals and correct them by the samples that are miscounted, which
an index holds, so the numbers are exact. The reconciler counts these samples anew, a minute after their last change:
most samples are in a batch by then, and are never counted.
"""

from collections import Counter
from collections.abc import Collection

from sqlalchemy import case, func, literal, select, text, union_all, update
from sqlalchemy.ext.asyncio import AsyncSession

from app.core.database import Database, chunked, dialect_insert, now
from app.models import COUNTED_STATES, IS_MISCOUNTED, Sample, SampleState, SampleTotal

MIN_AGE_SECONDS = 60.0  # since the last change of a sample that is counted
COUNT_STEP = 2000
WAITING_STATES = (*COUNTED_STATES, SampleState.BATCHED)


async def count_waiting(session: AsyncSession, policy_ids: Collection[str]) -> dict[tuple[str, SampleState], int]:
    """Return the number of samples that wait, by policy id and state; a state without samples is left out.

    Those in a batch are counted as rows: there are no more of them than a batch holds.
    """
    is_own = Sample.policy_id.in_(policy_ids)
    state = case((Sample.state.in_(COUNTED_STATES), Sample.state), else_="")
    columns = (Sample.policy_id, state.label("new_state"), Sample.counted_state, func.count())
    totals = select(SampleTotal.policy_id, SampleTotal.state, literal(""), SampleTotal.num_samples)
    batched = select(Sample.policy_id, Sample.state, literal(""), func.count())
    counts: Counter[tuple[str, str]] = Counter()
    queries = union_all(  # one statement, which sees one state of the database
        totals.where(SampleTotal.policy_id.in_(policy_ids)),
        select(*columns).where(is_own, text(IS_MISCOUNTED)).group_by(*columns[:3]),
        batched.where(is_own, Sample.state == SampleState.BATCHED).group_by(Sample.policy_id, Sample.state),
    )
    for policy_id, new_state, old_state, count in await session.execute(queries):
        counts[policy_id, new_state] += count
        counts[policy_id, old_state] -= count
    return {(id, SampleState(state)): count for (id, state), count in counts.items() if state and count}


async def count_miscounted(db: Database) -> int:
    """Count up to COUNT_STEP miscounted samples anew; return how many."""
    return await db.retry_on_deadlock(_count_miscounted)


async def _count_miscounted(session: AsyncSession) -> int:
    is_old = Sample.changed_at < now() - MIN_AGE_SECONDS
    query = select(Sample.turn_id, Sample.policy_id, Sample.state, Sample.counted_state)
    query = query.where(text(IS_MISCOUNTED), is_old).order_by(Sample.changed_at, Sample.turn_id).limit(COUNT_STEP)
    rows = (await session.execute(query.with_for_update(skip_locked=True))).all()
    changes: Counter[tuple[str, str]] = Counter()
    for row in rows:
        if row.state in COUNTED_STATES:
            changes[row.policy_id, row.state] += 1
        if row.counted_state:
            changes[row.policy_id, row.counted_state] -= 1
    counted_state = case((Sample.state.in_(COUNTED_STATES), Sample.state), else_="")
    # Nothing that the assembly depends on has changed.
    values = {"counted_state": counted_state, "changed_at": Sample.changed_at}
    for turn_ids in chunked([row.turn_id for row in rows]):
        await session.execute(update(Sample).where(Sample.turn_id.in_(turn_ids)).values(values))
    for (policy_id, state), change in sorted(changes.items()):
        insert = dialect_insert(session, SampleTotal).values(policy_id=policy_id, state=state, num_samples=change)
        added = {"num_samples": SampleTotal.num_samples + insert.excluded.num_samples}
        await session.execute(insert.on_conflict_do_update(index_elements=["policy_id", "state"], set_=added))
    return len(rows)
