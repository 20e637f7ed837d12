"""The samples of batches: frozen into one, trained, returned, dropped, or taken back by a version that is live again.

    open ── freeze ──▶ batched ── mark_trained ──▶ trained ◀── reclaim_samples ── open, dropped
      ▲                   │ the batch failed          │ the version was rejected or undone
      └── return_samples ─┴───────────────────────────┘

A returned sample is open again, unless its turn must not be learned from any more, a rater of it is quarantined, or it
has returned MAX_RETURNS times before. `Feedback.batch_id` follows the samples. All batches of a call are of the locked
policy. Rows are locked in the order of curation: rewards, samples, feedback.
"""

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence

from sqlalchemy import ColumnElement, and_, case, or_, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from app.core.database import chunked, now
from app.core.jobs import enqueue_after_commit
from app.models import Batch, BatchState, BatchTurn, Sample, SampleRule, SampleState, Turn
from app.policies.locks import LockedPolicy
from app.raters.service import BLOCKED
from app.training.automated_samples import find_voted, forget_batches, read_voted, reclaim_automated
from app.training.batch_feedback import assign_feedback, free_feedback, free_feedback_on, leave_batch
from app.training.recomputation import request_recomputation
from app.training.refused_rewards import BlockedTurns, compute_again, find_blocked, find_quarantined
from app.training.vote_totals import reopen_votes_of_batches, reopen_votes_on_turns

MAX_RETURNS = 3
NO_CONTRAST = "the algorithm had nothing to compare in its batch: it waits for new samples"
UNDONE = "the version that learned from it was undone before anybody judged it"
WAITS_FOR_NEW = (NO_CONTRAST, UNDONE)  # reasons of samples that a batch has only together with others
ERASED = "its turn was deleted"
IN_BATCH = (SampleState.BATCHED, SampleState.TRAINED)
# A version that is live again does not take these back: they are not learned from, whichever version serves.
NEVER_RECLAIMED = (
    SampleRule.ERASED,
    SampleRule.EXCLUDED,
    SampleRule.RATER_BLOCKED,
    SampleRule.NOTHING_TO_COMPARE,  # the version did not learn from it
)


async def freeze(locked: LockedPolicy, batch: Batch, samples: Sequence[Sample]) -> None:
    """Move open samples into the batch, with the feedback that their rewards come from."""
    session = locked.session
    for sample in samples:
        sample.batch_id, sample.state, sample.rule, sample.reason = batch.id, SampleState.BATCHED, None, None
        session.add(BatchTurn(batch_id=batch.id, turn_id=sample.turn_id, automated=sample.is_automated))
    await session.flush()
    await assign_feedback(session, [sample.turn_id for sample in samples])


async def mark_trained(locked: LockedPolicy, batch_id: str) -> None:
    """Mark the samples of a batch as trained. Curation opens those whose scores people have replaced meanwhile."""
    session = locked.session
    await session.execute(
        update(Sample)
        .where(Sample.batch_id == batch_id, Sample.state == SampleState.BATCHED)
        .values(state=SampleState.TRAINED, reason=None)
    )
    if voted := await find_voted(session, batch_id):
        await request_recomputation(session, voted)
        enqueue_after_commit(session, "curate")


async def drop_unlearned(
    session: AsyncSession, batch_id: str, rule: SampleRule, reason: str, condition: ColumnElement[bool]
) -> None:
    """Drop samples of a batch that its update does not learn from. Whoever has claimed the batch needs no lock."""
    turn_ids = list(
        await session.scalars(
            update(Sample)
            .where(Sample.batch_id == batch_id, Sample.state == SampleState.BATCHED, condition)
            .values(state=SampleState.DROPPED, rule=rule, reason=reason, batch_id=None)
            .returning(Sample.turn_id)
        )
    )
    await leave_batch(session, batch_id, turn_ids)


async def drop_trained(
    locked: LockedPolicy, reasons: Mapping[str, str], rule: SampleRule, limit: int | None = None
) -> bool:
    """Drop the samples that versions have learned from, and that are not learned from again.

    Returns whether that were all of them.

    Args:
        reasons: By the id of each batch, why its samples are dropped.
        limit: Drop at most so many; the next call goes on with the others.
    """
    if not reasons:
        return True
    session = locked.session
    part = await _find_part(session, reasons, (SampleState.TRAINED,), limit)
    of_part = () if part is None else (Sample.turn_id.in_(part),)
    await session.execute(
        update(Sample)
        .where(Sample.batch_id.in_(reasons), Sample.state == SampleState.TRAINED, *of_part)
        .values(
            state=SampleState.DROPPED,
            rule=rule,
            reason=case(dict(reasons), value=Sample.batch_id),
            batch_id=None,
        )
    )
    await forget_batches(session, reasons)
    if part is not None:
        await reopen_votes_on_turns(session, part)
        await free_feedback_on(session, part, reasons)
        return False
    await reopen_votes_of_batches(session, *reasons)
    await free_feedback(session, reasons)
    return True


async def return_samples(
    locked: LockedPolicy,
    batch_ids: Collection[str],
    reason: str,
    exhausted: SampleRule | None = None,
    limit: int | None = None,
) -> bool:
    """Return the samples of batches, so that they can be learned from again. Returns whether that were all of them.

    Their rewards are computed again, because feedback may have come while they were in a batch. The number of
    statements grows with the samples, a thousand at a time, and not with the batches.

    Args:
        reason: Why they return, as a sentence.
        exhausted: The return counts, and samples that have returned MAX_RETURNS times before are dropped by this rule.
            None: the return does not count, because it says nothing about the samples.
        limit: Return at most so many; the next call goes on with the others.
    """
    if not batch_ids:
        return True
    session = locked.session
    await forget_batches(session, batch_ids)
    in_batch: list[ColumnElement[bool]] = [Sample.batch_id.in_(batch_ids), Sample.state.in_(IN_BATCH)]
    part = await _find_part(session, batch_ids, IN_BATCH, limit)
    if part is not None:
        in_batch.append(Sample.turn_id.in_(part))
    turn_ids = list(await session.scalars(select(Sample.turn_id).where(*in_batch))) if part is None else part
    if not turn_ids:
        return True
    returned, blocked = await _reopen(session, turn_ids, reason, exhausted, in_batch)
    if part is None:
        await reopen_votes_of_batches(session, *batch_ids)
    await reopen_votes_on_turns(session, turn_ids)
    if part is None:
        await free_feedback(session, batch_ids)
    else:
        await free_feedback_on(session, part, batch_ids)
    await compute_again(session, returned, blocked)
    return part is None


async def _find_part(
    session: AsyncSession, batch_ids: Collection[str], states: Collection[SampleState], limit: int | None
) -> list[str] | None:
    """Return the first `limit` turns whose samples are in these batches and states; None if there are no more."""
    if limit is None:
        return None
    query = select(Sample.turn_id).where(Sample.batch_id.in_(batch_ids), Sample.state.in_(states))
    turn_ids = list(await session.scalars(query.order_by(Sample.turn_id).limit(limit + 1)))
    return turn_ids[:limit] if len(turn_ids) > limit else None


async def return_unlearned(locked: LockedPolicy, batch_id: str, turn_ids: Collection[str], reason: str) -> None:
    """Return samples of a batch that its update has not learned from, as `return_samples` does. It does not count."""
    if not turn_ids:
        return
    session = locked.session
    in_batch = (Sample.batch_id == batch_id, Sample.state == SampleState.BATCHED, Sample.turn_id.in_(turn_ids))
    returned, blocked = await _reopen(session, turn_ids, reason, None, in_batch)
    await leave_batch(session, batch_id, turn_ids)
    await compute_again(session, returned, blocked)


async def _reopen(
    session: AsyncSession,
    turn_ids: Collection[str],
    reason: str,
    exhausted: SampleRule | None,
    in_batch: Sequence[ColumnElement[bool]],
) -> tuple[list[str], BlockedTurns]:
    """Take the samples of these turns out of their batch.

    Returns the turns whose samples can be learned from, and those with a reward of a blocked rater.
    """
    blocked = await find_blocked(session, turn_ids)
    columns = (Sample.turn_id, Sample.num_returns, Turn.deleted_at, Turn.exclusion_reason)
    query = select(*columns).join(Turn, Turn.id == Sample.turn_id).where(*in_batch)
    # Columns, not objects: the rows may be ten thousand, and nobody else writes to SQLite meanwhile.
    rows = (await session.execute(query.order_by(Sample.turn_id).with_for_update(of=Sample))).all()
    quarantined = await find_quarantined(session, turn_ids)
    by_outcome: defaultdict[tuple[SampleState, SampleRule | None, str | None], list[str]] = defaultdict(list)
    for row in rows:
        outcome: tuple[SampleState, SampleRule | None, str | None] = (SampleState.OPEN, None, reason)
        if row.deleted_at is not None:
            outcome = (SampleState.DROPPED, SampleRule.ERASED, ERASED)
        elif row.exclusion_reason is not None:
            outcome = (SampleState.DROPPED, SampleRule.EXCLUDED, row.exclusion_reason)
        elif row.turn_id in blocked.alone:
            outcome = (SampleState.DROPPED, SampleRule.RATER_BLOCKED, BLOCKED)
        elif exhausted is not None and row.num_returns >= MAX_RETURNS:
            outcome = (SampleState.DROPPED, exhausted, f"{reason}; it had returned {MAX_RETURNS} times before")
        elif row.turn_id in quarantined:
            outcome = (SampleState.QUARANTINED, None, quarantined[row.turn_id])
        by_outcome[outcome].append(row.turn_id)
    returned: list[str] = []
    for (state, rule, why), ids in by_outcome.items():
        is_counted = exhausted is not None and state != SampleState.DROPPED
        values = {"state": state, "rule": rule, "reason": why, "batch_id": None}
        for chunk in chunked(ids):
            change = update(Sample).where(Sample.turn_id.in_(chunk)).values(values)
            await session.execute(change.values(num_returns=Sample.num_returns + 1) if is_counted else change)
        if state != SampleState.DROPPED:
            returned += ids
    return returned, blocked


async def break_up_batches(
    locked: LockedPolicy, batch_ids: Collection[str], state: BatchState, reason: str
) -> list[str]:
    """Settle those of the batches that are open, and return their samples. Returns these batches' ids.

    The fencing token changes, so that a trainer that has claimed such a batch cannot commit it.
    """
    settled = await locked.session.execute(
        update(Batch)
        .where(Batch.id.in_(batch_ids), Batch.state == BatchState.OPEN)
        .values(
            state=state,
            reason=reason,
            settled_at=now(),
            fence=Batch.fence + 1,
            lease_owner=None,
            lease_until=None,
        )
        .returning(Batch.id)
    )
    settled_ids = sorted(settled.scalars())
    await return_samples(locked, settled_ids, f"its batch was broken up: {reason}")
    return settled_ids


async def reclaim_samples(
    locked: LockedPolicy, batch_ids: Collection[str], after: str | None = None, limit: int | None = None
) -> str | None:
    """Mark the samples of these batches as trained again: versions of one line that learned from them are live again.

    None of them is in an open batch, nor trained by another version of the line, except for votes that replace the
    automated rewards that one of these batches has learned from.

    Args:
        after: Leave out the turns up to this id.
        limit: Take back at most so many.

    Returns:
        The last turn that was taken back, if others follow; None at the end.
    """
    if not batch_ids:
        return None
    session = locked.session
    of_part: list[ColumnElement[bool]] = [BatchTurn.batch_id.in_(batch_ids), BatchTurn.turn_id > (after or "")]
    last: str | None = None
    if limit is not None:
        is_part = Sample.turn_id.in_(select(BatchTurn.turn_id).where(*of_part))
        turns = select(Sample.turn_id).where(is_part).order_by(Sample.turn_id).limit(limit + 1)
        part = list(await session.scalars(turns))
        if len(part) > limit:
            last = part[limit - 1]
            of_part.append(BatchTurn.turn_id <= last)
    learned = await session.execute(select(BatchTurn.turn_id, BatchTurn.batch_id, BatchTurn.automated).where(*of_part))
    uses = list(learned)
    automated = {row.turn_id: row.batch_id for row in uses if row.automated}
    batch_of = automated | {row.turn_id: row.batch_id for row in uses if not row.automated}
    voted = await read_voted(session, automated)
    is_free = or_(
        Sample.state.in_((SampleState.OPEN, SampleState.QUARANTINED, SampleState.TRAINED)),
        and_(Sample.state == SampleState.DROPPED, Sample.rule.not_in(NEVER_RECLAIMED)),
    )
    rows = await session.scalars(
        select(Sample)
        .where(
            Sample.turn_id.in_(select(BatchTurn.turn_id).where(*of_part)),
            is_free,
        )
        .order_by(Sample.turn_id)
        .with_for_update()
        .execution_options(populate_existing=True)
    )
    turn_ids: list[str] = []
    for sample in list(rows):
        is_replaced = reclaim_automated(sample, automated, voted)
        if sample.state == SampleState.TRAINED or (
            is_replaced and batch_of[sample.turn_id] == automated[sample.turn_id]
        ):
            continue
        sample.state, sample.batch_id = SampleState.TRAINED, batch_of[sample.turn_id]
        sample.rule = sample.reason = None
        turn_ids.append(sample.turn_id)
    await session.flush()
    await reopen_votes_on_turns(session, turn_ids)
    await assign_feedback(session, turn_ids, older_only=True)
    return last
