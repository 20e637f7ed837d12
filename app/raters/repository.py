"""Queries on raters, and on the samples that carry their words."""

from collections.abc import Collection, Iterator, Sequence

from sqlalchemy import ColumnElement, exists, or_, select, tuple_, update
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import aliased

from app.core.database import dialect_insert, now
from app.models import Feedback, Policy, Rater, RaterStanding, Reward, Sample, SampleState, Turn

EVERYBODY = "*"  # the row that counts what all raters of a project say; their own names hold a "/"
PART = 1000  # turns named in one statement
AGAIN_SECONDS = 60.0  # how long a sample keeps out of batches that waits for curate to think again


async def rater(session: AsyncSession, project_id: str, name: str) -> Rater | None:
    return await session.get(Rater, (project_id, name), with_for_update=True)


async def newcomer(session: AsyncSession, project_id: str, name: str) -> Rater:
    """Whoever else meets this rater for the first time just now waits for our row, or has made it: then it is ours to
    change, as it would be had it been there."""
    row = dialect_insert(session, Rater).values(project_id=project_id, name=name)
    await session.execute(row.on_conflict_do_update(index_elements=["project_id", "name"], set_={"name": name}))
    return await session.get_one(Rater, (project_id, name), with_for_update=True)


async def raters(
    session: AsyncSession, project_id: str, standing: str | None, after: str | None, limit: int
) -> list[Rater]:
    """By name."""
    rows = select(Rater).where(Rater.project_id == project_id, Rater.name != EVERYBODY)
    if standing is not None:
        rows = rows.where(Rater.standing == standing)
    if after is not None:
        rows = rows.where(Rater.name > after)
    return list(await session.scalars(rows.order_by(Rater.name).limit(limit)))


async def quarantine_page(
    session: AsyncSession, project_id: str, after: tuple[float, str] | None, limit: int
) -> list[tuple[Sample, str, str]]:
    """Samples that wait for an admin, the oldest first, with their policies' names and completions."""
    rows = (
        select(Sample, Policy.name, Turn.completion_id)
        .join(Policy, Policy.id == Sample.policy_id)
        .join(Turn, Turn.id == Sample.turn_id)
        .where(Policy.project_id == project_id, Sample.state == SampleState.QUARANTINED)
    )
    if after is not None:
        rows = rows.where(tuple_(Sample.created_at, Sample.turn_id) > tuple_(*after))
    page = await session.execute(rows.order_by(Sample.created_at, Sample.turn_id).limit(limit))
    return [(sample, policy, completion) for sample, policy, completion in page]


async def place(session: AsyncSession, project_id: str, turn_id: str) -> tuple[float, str] | None:
    """Where a sample stands in that order, whether it is still held or not."""
    created_at = await session.scalar(
        select(Sample.created_at)
        .join(Policy, Policy.id == Sample.policy_id)
        .where(Policy.project_id == project_id, Sample.turn_id == turn_id)
    )
    return None if created_at is None else (created_at, turn_id)


async def quarantine_samples(session: AsyncSession, project_id: str, name: str, reason: str) -> int:
    """What waits for a batch waits for an admin instead. Returns how many."""
    turn_ids = await _of(session, project_id, name, SampleState.OPEN)
    await _move(session, turn_ids, SampleState.QUARANTINED, reason)
    return len(turn_ids)


async def release_samples(session: AsyncSession, project_id: str, name: str) -> int:
    """Those that nobody else who is held has a word in. Returns how many."""
    free = set(await _of(session, project_id, name, SampleState.QUARANTINED))
    for some in _parts(free):
        free -= set(
            await session.scalars(
                select(Reward.turn_id)
                .join(Rater, Rater.name == Reward.rater)
                .where(
                    Reward.turn_id.in_(some),
                    Rater.project_id == project_id,
                    Rater.standing == RaterStanding.QUARANTINED,
                    Rater.name != name,
                )
            )
        )
    await _move(session, free, SampleState.OPEN, None)
    return len(free)


async def drop_samples(session: AsyncSession, project_id: str, name: str, reason: str) -> int:
    """What is not in a batch yet is never learned from by this rater's word. Returns how many were dropped.

    A turn that others have judged too goes back to curate, which thinks again without this rater.
    """
    turn_ids = await _of(session, project_id, name, SampleState.QUARANTINED)
    turn_ids += await _of(session, project_id, name, SampleState.OPEN)
    others = or_(Reward.rater.is_(None), Reward.rater != name)
    shared: set[str] = set()
    for some in _parts(turn_ids):
        await session.execute(
            update(Reward)
            .where(Reward.turn_id.in_(some), Reward.rater == name)
            .values(weight=0.0)
            .execution_options(synchronize_session=False)
        )
        shared |= set(
            await session.scalars(select(Reward.turn_id).where(Reward.turn_id.in_(some), Reward.weight > 0, others))
        )
    alone = set(turn_ids) - shared
    await _move(session, alone, SampleState.DROPPED, reason)
    await _think_again(session, shared)
    return len(alone)


async def lock_words(session: AsyncSession, project_id: str, name: str) -> None:
    """Before the rater's own row, as curating does, so that neither waits for the other."""
    waiting = (SampleState.OPEN, SampleState.QUARANTINED)
    mine = (
        select(Sample.turn_id)
        .join(Policy, Policy.id == Sample.policy_id)
        .where(Policy.project_id == project_id, Sample.state.in_(waiting), _said_by(name))
    )
    await session.execute(
        select(Reward.id).where(Reward.turn_id.in_(mine)).order_by(Reward.turn_id, Reward.source).with_for_update()
    )


async def _of(session: AsyncSession, project_id: str, name: str, state: SampleState) -> list[str]:
    """The turns of samples in this state that the rater has a word in, locked. An open one that somebody else has
    locked is on its way into a batch: it is left alone, as waiting for it could end in a deadlock."""
    rows = await session.scalars(
        select(Sample.turn_id)
        .join(Policy, Policy.id == Sample.policy_id)
        .where(Policy.project_id == project_id, Sample.state == state, _said_by(name))
        .order_by(Sample.turn_id)
        .with_for_update(of=Sample, skip_locked=state == SampleState.OPEN)
    )
    return list(rows)


def _said_by(name: str) -> ColumnElement[bool]:
    word = aliased(Reward)
    return exists().where(word.turn_id == Sample.turn_id, word.rater == name)


async def _move(session: AsyncSession, turn_ids: Collection[str], state: SampleState, reason: str | None) -> None:
    for some in _parts(turn_ids):
        await session.execute(
            update(Sample)
            .where(Sample.turn_id.in_(some))
            .values(state=state, reason=reason)
            .execution_options(synchronize_session=False)
        )


async def _think_again(session: AsyncSession, turn_ids: Collection[str]) -> None:
    for some in _parts(turn_ids):
        await session.execute(
            update(Sample)
            .where(Sample.turn_id.in_(some))
            .values(state=SampleState.OPEN, reason=None, ready_at=now() + AGAIN_SECONDS)
            .execution_options(synchronize_session=False)
        )
        await session.execute(
            update(Feedback)
            .where(Feedback.turn_id.in_(some))
            .values(processed=False)
            .execution_options(synchronize_session=False)
        )


def _parts(turn_ids: Collection[str]) -> Iterator[Sequence[str]]:
    """A flood is of any size, and a statement's parameters are counted: in SQLite to 32,766. Always in one order."""
    ids = sorted(turn_ids)
    return (ids[start : start + PART] for start in range(0, len(ids), PART))
