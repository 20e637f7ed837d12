"""Queries on raters and on the samples whose rewards come from them."""

from collections.abc import Collection, Iterator, Sequence

from sqlalchemy import ColumnElement, exists, or_, select, update
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import aliased

from app.core.database import dialect_insert, now
from app.core.pagination import apply_keyset
from app.models import Feedback, Policy, Rater, RaterStanding, Reward, Sample, SampleState, Turn

ALL_RATERS = "*"  # the row with the totals of a project's raters; names of raters hold a "/"
MAX_TURNS_PER_STATEMENT = 1000
RECOMPUTE_DELAY_SECONDS = 60.0  # a sample stays out of batches for so long, while curation computes its reward again


async def lock_rater(session: AsyncSession, project_id: str, name: str) -> Rater | None:
    return await session.get(Rater, (project_id, name), with_for_update=True)


async def create_rater(session: AsyncSession, project_id: str, name: str) -> Rater:
    """Insert the rater, or find the row that another transaction has inserted meanwhile; return it locked."""
    row = dialect_insert(session, Rater).values(project_id=project_id, name=name)
    await session.execute(row.on_conflict_do_update(index_elements=["project_id", "name"], set_={"name": name}))
    return await session.get_one(Rater, (project_id, name), with_for_update=True)


async def list_raters(
    session: AsyncSession, project_id: str, standing: str | None, after: str | None, limit: int
) -> list[Rater]:
    """Return up to `limit + 1` raters, ordered by name."""
    rows = select(Rater).where(Rater.project_id == project_id, Rater.name != ALL_RATERS)
    if standing is not None:
        rows = rows.where(Rater.standing == standing)
    return list(await session.scalars(apply_keyset(rows, (Rater.name,), None if after is None else (after,), limit)))


async def list_quarantined(
    session: AsyncSession, project_id: str, after: tuple[float, str] | None, limit: int
) -> list[tuple[Sample, str, str]]:
    """Return up to `limit + 1` quarantined samples, the oldest first, with policy name and completion id."""
    rows = (
        select(Sample, Policy.name, Turn.completion_id)
        .join(Policy, Policy.id == Sample.policy_id)
        .join(Turn, Turn.id == Sample.turn_id)
        .where(Policy.project_id == project_id, Sample.state == SampleState.QUARANTINED)
    )
    page = await session.execute(apply_keyset(rows, (Sample.created_at, Sample.turn_id), after, limit))
    return [(sample, policy, completion) for sample, policy, completion in page]


async def find_sample_position(session: AsyncSession, project_id: str, turn_id: str) -> tuple[float, str] | None:
    """Return a sample's position in that order, also when it is no longer quarantined."""
    created_at = await session.scalar(
        select(Sample.created_at)
        .join(Policy, Policy.id == Sample.policy_id)
        .where(Policy.project_id == project_id, Sample.turn_id == turn_id)
    )
    return None if created_at is None else (created_at, turn_id)


async def quarantine_samples(session: AsyncSession, project_id: str, name: str, reason: str) -> int:
    """Move the rater's open samples to quarantine. Returns how many."""
    turn_ids = await _lock_samples(session, project_id, name, SampleState.OPEN)
    await _set_state(session, turn_ids, SampleState.QUARANTINED, reason)
    return len(turn_ids)


async def release_samples(session: AsyncSession, project_id: str, name: str) -> int:
    """Release the rater's samples, except those with a reward of another quarantined rater. Returns how many."""
    free = set(await _lock_samples(session, project_id, name, SampleState.QUARANTINED))
    for chunk in _chunks(free):
        free -= set(
            await session.scalars(
                select(Reward.turn_id)
                .join(Rater, Rater.name == Reward.rater)
                .where(
                    Reward.turn_id.in_(chunk),
                    Rater.project_id == project_id,
                    Rater.standing == RaterStanding.QUARANTINED,
                    Rater.name != name,
                )
            )
        )
    await _set_state(session, free, SampleState.OPEN, None)
    return len(free)


async def drop_samples(session: AsyncSession, project_id: str, name: str, reason: str) -> int:
    """Remove the rater's rewards from samples that are in no batch yet. Returns how many samples were dropped.

    A sample with rewards of others is not dropped: curation computes its reward again without this rater.
    """
    turn_ids = await _lock_samples(session, project_id, name, SampleState.QUARANTINED)
    turn_ids += await _lock_samples(session, project_id, name, SampleState.OPEN)
    others = or_(Reward.rater.is_(None), Reward.rater != name)
    shared: set[str] = set()
    for chunk in _chunks(turn_ids):
        await session.execute(
            update(Reward)
            .where(Reward.turn_id.in_(chunk), Reward.rater == name)
            .values(weight=0.0)
            .execution_options(synchronize_session=False)
        )
        shared |= set(
            await session.scalars(select(Reward.turn_id).where(Reward.turn_id.in_(chunk), Reward.weight > 0, others))
        )
    alone = set(turn_ids) - shared
    await _set_state(session, alone, SampleState.DROPPED, reason)
    await _recompute(session, shared)
    return len(alone)


async def lock_rewards(session: AsyncSession, project_id: str, name: str) -> None:
    """Lock the rewards of the rater's samples. Curation locks rewards before the rater's row too: no deadlock."""
    states = (SampleState.OPEN, SampleState.QUARANTINED)
    turn_ids = (
        select(Sample.turn_id)
        .join(Policy, Policy.id == Sample.policy_id)
        .where(Policy.project_id == project_id, Sample.state.in_(states), _has_reward_of(name))
    )
    await session.execute(
        select(Reward.id).where(Reward.turn_id.in_(turn_ids)).order_by(Reward.turn_id, Reward.source).with_for_update()
    )


async def _lock_samples(session: AsyncSession, project_id: str, name: str, state: SampleState) -> list[str]:
    """Lock the samples in this state with a reward of this rater and return their turn ids.

    An open sample that another transaction has locked is about to enter a batch. It is skipped, because waiting for it
    could cause a deadlock.
    """
    rows = await session.scalars(
        select(Sample.turn_id)
        .join(Policy, Policy.id == Sample.policy_id)
        .where(Policy.project_id == project_id, Sample.state == state, _has_reward_of(name))
        .order_by(Sample.turn_id)
        .with_for_update(of=Sample, skip_locked=state == SampleState.OPEN)
    )
    return list(rows)


def _has_reward_of(name: str) -> ColumnElement[bool]:
    reward = aliased(Reward)
    return exists().where(reward.turn_id == Sample.turn_id, reward.rater == name)


async def _set_state(session: AsyncSession, turn_ids: Collection[str], state: SampleState, reason: str | None) -> None:
    for chunk in _chunks(turn_ids):
        await session.execute(
            update(Sample)
            .where(Sample.turn_id.in_(chunk))
            .values(state=state, reason=reason)
            .execution_options(synchronize_session=False)
        )


async def _recompute(session: AsyncSession, turn_ids: Collection[str]) -> None:
    for chunk in _chunks(turn_ids):
        await session.execute(
            update(Sample)
            .where(Sample.turn_id.in_(chunk))
            .values(state=SampleState.OPEN, reason=None, ready_at=now() + RECOMPUTE_DELAY_SECONDS)
            .execution_options(synchronize_session=False)
        )
        await session.execute(
            update(Feedback)
            .where(Feedback.turn_id.in_(chunk))
            .values(processed=False)
            .execution_options(synchronize_session=False)
        )


def _chunks(turn_ids: Collection[str]) -> Iterator[Sequence[str]]:
    """Yield the sorted ids in chunks: SQLite limits a statement to 32,766 parameters."""
    ids = sorted(turn_ids)
    return (ids[start : start + MAX_TURNS_PER_STATEMENT] for start in range(0, len(ids), MAX_TURNS_PER_STATEMENT))
