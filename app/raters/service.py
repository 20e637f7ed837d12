"""Standings of raters, and the samples whose rewards come from them."""

from collections.abc import Collection, Sequence
from typing import Any, TypeVar

from sqlalchemy import ColumnElement, RowMapping, Select, and_, exists, or_, select, update
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import InstrumentedAttribute, aliased

from app.core.database import chunked, dialect_insert, now
from app.core.errors import require_row
from app.core.jobs import enqueue_after_commit
from app.core.pagination import apply_keyset
from app.models import (
    AuditAction,
    Feedback,
    Policy,
    Rater,
    RaterStanding,
    Reward,
    Sample,
    SampleRule,
    SampleState,
    Turn,
    record_audit,
)

K = TypeVar("K", str, int)

ALL_RATERS = "*"  # the row with the totals of a project's raters; names of raters hold a "/"
BLOCKED = "its rater is blocked"
RECOMPUTE_DELAY_SECONDS = 60.0  # a sample stays out of batches for so long, while curation computes its reward again


async def set_standing(
    session: AsyncSession, project_id: str, name: str, standing: RaterStanding, reason: str | None, *, actor: str
) -> tuple[Rater, int]:
    """Set a rater's standing; the rater need not exist yet. Returns the rater and the number of updated samples."""
    await _lock_rewards(session, project_id, name)
    values = {"standing": standing, "reason": reason or f"{standing} by an admin"}
    row = dialect_insert(session, Rater).values(project_id=project_id, name=name, **values)
    await session.execute(row.on_conflict_do_update(index_elements=["project_id", "name"], set_=values))
    num_samples = await _update_samples(session, project_id, name, standing, values["reason"])
    details = {"rater": name, "samples": num_samples}
    action = AuditAction(f"rater.{standing}")
    record_audit(session, actor, action, name[:128], reason, project_id=project_id, **details)
    return await session.get_one(Rater, (project_id, name)), num_samples


async def _update_samples(
    session: AsyncSession, project_id: str, name: str, standing: RaterStanding, reason: str
) -> int:
    if standing == RaterStanding.QUARANTINED:
        return await quarantine_samples(session, project_id, name, reason)
    enqueue_after_commit(session, "curate", "assemble")
    if standing == RaterStanding.BLOCKED:
        return await drop_samples(session, project_id, name, BLOCKED)
    return await release_samples(session, project_id, name)


async def list_raters(
    session: AsyncSession, project_id: str, standing: str | None, after: str | None, limit: int
) -> list[Rater]:
    """Return up to `limit + 1` raters, ordered by name."""
    rows = select(Rater).where(Rater.project_id == project_id, Rater.name != ALL_RATERS)
    if standing is not None:
        rows = rows.where(Rater.standing == standing)
    return list(await session.scalars(apply_keyset(rows, (Rater.name,), None if after is None else (after,), limit)))


async def list_quarantined(
    session: AsyncSession, project_id: str, after: str | None, limit: int
) -> Sequence[RowMapping]:
    """Return up to `limit + 1` quarantined samples as fields of their views, the oldest first.

    Raises NotFound if `after` is no sample of this project. It may be one that is no longer quarantined.
    """
    columns = (Sample.turn_id, Sample.reward, Sample.reason, Sample.rater, Sample.conversation_id, Sample.created_at)
    query = (
        select(*columns, Turn.completion_id, Policy.name.label("policy"))
        .join(Policy, Policy.id == Sample.policy_id)
        .join(Turn, Turn.id == Sample.turn_id)
        .where(Policy.project_id == project_id)
    )
    position = None
    if after is not None:
        row = (await session.execute(query.where(Sample.turn_id == after))).one_or_none()
        last = require_row(row, f"There is no sample of a turn '{after}'.", param="after")
        position = (last.created_at, last.turn_id)
    query = query.where(Sample.state == SampleState.QUARANTINED)
    page = await session.execute(apply_keyset(query, (Sample.created_at, Sample.turn_id), position, limit))
    return page.mappings().all()


async def quarantine_samples(session: AsyncSession, project_id: str, name: str, reason: str) -> int:
    """Move the rater's open samples to quarantine. Returns how many."""
    turn_ids = await _lock_samples(session, project_id, name, SampleState.OPEN)
    await _update(session, Sample.turn_id, turn_ids, state=SampleState.QUARANTINED, reason=reason)
    return len(turn_ids)


async def release_samples(session: AsyncSession, project_id: str, name: str) -> int:
    """Release the rater's samples, except those with a reward of another quarantined rater. Returns how many."""
    free = set(await _lock_samples(session, project_id, name, SampleState.QUARANTINED))
    is_other = (Rater.project_id == project_id, Rater.standing == RaterStanding.QUARANTINED, Rater.name != name)
    has_other = is_rated_by(select(Rater.name).where(*is_other))
    for chunk in chunked(free):
        free -= set(await session.scalars(select(Sample.turn_id).where(Sample.turn_id.in_(chunk), has_other)))
    await _update(session, Sample.turn_id, free, state=SampleState.OPEN, reason=None)
    return len(free)


async def drop_samples(session: AsyncSession, project_id: str, name: str, reason: str) -> int:
    """Remove the rater's rewards from samples that are in no batch yet. Returns how many samples were dropped.

    A sample with rewards of others is not dropped: curation computes its reward again without this rater. Where no
    feedback lets it, the rater keeps the weight until a batch is to have the sample: the assembly computes it then.
    """
    turn_ids = await _lock_samples(session, project_id, name, SampleState.QUARANTINED)
    turn_ids += await _lock_samples(session, project_id, name, SampleState.OPEN)
    others = or_(Reward.rater.is_(None), Reward.rater != name)
    shared: set[str] = set()
    for chunk in chunked(turn_ids):
        query = select(Reward.turn_id).where(Reward.turn_id.in_(chunk), Reward.weight > 0, others)
        shared |= set(await session.scalars(query))
        in_attempts = (
            Sample.turn_id.in_(chunk),
            Sample.episode_id.is_not(None),
        )  # rewards of other turns
        shared |= set(await session.scalars(select(Sample.turn_id).where(*in_attempts)))
    alone = set(turn_ids) - shared
    seqs, computed = await read_feedback(session, shared)
    await _update(session, Reward.turn_id, alone | computed, Reward.rater == name, weight=0.0)
    await _update(
        session, Sample.turn_id, alone, state=SampleState.DROPPED, rule=SampleRule.RATER_BLOCKED, reason=reason
    )
    recompute_at = now() + RECOMPUTE_DELAY_SECONDS
    await _update(session, Sample.turn_id, shared, state=SampleState.OPEN, reason=None)
    await _update(session, Sample.turn_id, computed, ready_at=recompute_at)
    await _update(session, Feedback.seq, seqs, processed=False)
    return len(alone)


async def read_feedback(session: AsyncSession, turn_ids: Collection[str]) -> tuple[set[int], set[str]]:
    """Return the numbers of the feedback that the rewards of these turns come from, as far as they count.

    Also returns the turns with such feedback: curation computes their rewards again when it processes it again.

    It may be about a turn, a whole conversation or episode, or a ranking. The samples of these turns wait, so that none
    of these votes is in a VoteTotal because of them.
    """
    seqs: set[int] = set()
    rated: set[str] = set()
    for chunk in chunked(turn_ids):
        is_counted = (Reward.turn_id.in_(chunk), Reward.weight > 0)
        rewards = select(Reward.feedback_seq, Reward.turn_id).where(*is_counted)
        for seq, turn_id in await session.execute(rewards):
            if seq is not None:
                seqs.add(seq)
                rated.add(turn_id)
    return seqs, rated


async def _lock_rewards(session: AsyncSession, project_id: str, name: str) -> None:
    """Lock the rewards of the rater's samples. Curation locks rewards before the rater's row too: no deadlock."""
    turn_ids = _select_samples(project_id, name, SampleState.OPEN, SampleState.QUARANTINED)
    rewards = select(Reward.id).where(Reward.turn_id.in_(turn_ids)).order_by(Reward.turn_id, Reward.source)
    await session.execute(rewards.with_for_update())


async def _lock_samples(session: AsyncSession, project_id: str, name: str, state: SampleState) -> list[str]:
    """Lock the samples in this state with a reward of this rater and return their turn ids.

    An open sample that another transaction has locked is about to enter a batch. It is skipped, because waiting for it
    could cause a deadlock.
    """
    query = _select_samples(project_id, name, state).order_by(Sample.turn_id)
    rows = await session.scalars(query.with_for_update(of=Sample, skip_locked=state == SampleState.OPEN))
    return list(rows)


def _select_samples(project_id: str, name: str, *states: SampleState) -> Select[str]:
    """Return the query of the turn ids of samples with a reward of this rater."""
    return (
        select(Sample.turn_id)
        .join(Policy, Policy.id == Sample.policy_id)
        .where(Policy.project_id == project_id, Sample.state.in_(states), is_rated_by([name]))
    )


def is_rated_by(names: Collection[str] | Select[str]) -> ColumnElement[bool]:
    """Return the condition that a Sample's reward has a part of one of these raters.

    That is a reward of its turn or, where its episode is compared as a whole, of any turn of the episode.
    """
    reward, of_episode, turn = aliased(Reward), aliased(Reward), aliased(Turn)
    on_turn = exists().where(reward.turn_id == Sample.turn_id, reward.rater.in_(names))
    in_episode = (turn.episode_id == Sample.episode_id, of_episode.turn_id == turn.id, of_episode.rater.in_(names))
    return or_(on_turn, and_(Sample.episode_id.is_not(None), exists().where(*in_episode)))


async def _update(
    session: AsyncSession,
    column: InstrumentedAttribute[K],
    keys: Collection[K],
    *conditions: ColumnElement[bool],
    **values: Any,
) -> None:
    """Update the rows whose `column` has one of these values, in its table."""
    for chunk in chunked(keys):
        await session.execute(update(column.class_).where(column.in_(chunk), *conditions).values(**values))
