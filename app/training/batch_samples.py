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
from typing import Any, NamedTuple

from sqlalchemy import ColumnElement, and_, case, delete, exists, func, or_, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from app.core.database import chunked, now
from app.core.jobs import enqueue_after_commit
from app.core.rows import AnySelect
from app.models import (
    Batch,
    BatchState,
    BatchTurn,
    Feedback,
    Rater,
    RaterStanding,
    Reward,
    Sample,
    SampleRule,
    SampleState,
    Turn,
)
from app.policies.locks import LockedPolicy
from app.raters.service import BLOCKED, read_feedback
from app.training.automated_samples import (
    find_voted,
    forget_batches,
    read_voted,
    reclaim_automated,
)
from app.training.recomputation import request_recomputation
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
    blocked = await _find_blocked(session, missed)
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


async def freeze(locked: LockedPolicy, batch: Batch, samples: Sequence[Sample]) -> None:
    """Move open samples into the batch, with the feedback that their rewards come from."""
    session = locked.session
    for sample in samples:
        sample.batch_id, sample.state, sample.rule, sample.reason = batch.id, SampleState.BATCHED, None, None
        session.add(BatchTurn(batch_id=batch.id, turn_id=sample.turn_id, automated=sample.is_automated))
    await session.flush()
    await _assign_feedback(session, [sample.turn_id for sample in samples])


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
    await _leave_batch(session, batch_id, turn_ids)


async def _leave_batch(session: AsyncSession, batch_id: str, turn_ids: Collection[str]) -> None:
    """Remove turns from the batch whose samples have left it, and the feedback behind their rewards alone."""
    still_used = (
        select(Reward.feedback_seq)
        .join(Sample, Sample.turn_id == Reward.turn_id)
        .where(Sample.batch_id == batch_id, Reward.feedback_seq.is_not(None))
    )
    for chunk in chunked(turn_ids):
        await session.execute(delete(BatchTurn).where(BatchTurn.batch_id == batch_id, BatchTurn.turn_id.in_(chunk)))
        dropped = select(Reward.feedback_seq).where(Reward.turn_id.in_(chunk), Reward.feedback_seq.is_not(None))
        await session.execute(
            update(Feedback)
            .where(Feedback.batch_id == batch_id, Feedback.seq.in_(dropped), Feedback.seq.not_in(still_used))
            .values(batch_id=None)
        )


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
        await _free_feedback_on(session, part, reasons)
        return False
    await reopen_votes_of_batches(session, *reasons)
    await _free_feedback(session, reasons)
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
        await _free_feedback(session, batch_ids)
    else:
        await _free_feedback_on(session, part, batch_ids)
    await _compute_again(session, returned, blocked)
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
    await _leave_batch(session, batch_id, turn_ids)
    await _compute_again(session, returned, blocked)


async def _compute_again(session: AsyncSession, returned: Collection[str], blocked: BlockedTurns) -> None:
    """Let the rewards of returned samples be computed again, without those of blocked raters.

    What no feedback lets curation compute keeps its reward and its raters' weights until a batch is to have it:
    `set_aside` finds it by them.
    """
    _, computed = await read_feedback(session, blocked.shared)
    await _remove_weights(session, blocked.alone | computed | (blocked.shared - set(returned)))
    await request_recomputation(session, returned)
    enqueue_after_commit(session, "curate", "assemble")


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
    blocked = await _find_blocked(session, turn_ids)
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
    await _assign_feedback(session, turn_ids, older_only=True)
    return last


async def _find_blocked(session: AsyncSession, turn_ids: Collection[str]) -> BlockedTurns:
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


async def _assign_feedback(session: AsyncSession, turn_ids: Sequence[str], *, older_only: bool = False) -> None:
    """Record that the samples' batches learn from the feedback behind their rewards. Feedback in a batch stays.

    Where several samples use the same feedback, its batch is the oldest of theirs.

    Args:
        older_only: Only feedback that is older than the batch.
    """
    conditions = (Feedback.created_at <= Batch.created_at,) if older_only else ()
    for chunk in chunked(turn_ids):
        place = func.row_number().over(partition_by=Feedback.seq, order_by=(Batch.created_at, Batch.id))
        used = (
            select(Feedback.seq, Batch.id.label("batch_id"), place.label("place"))
            .join(Reward, Reward.feedback_seq == Feedback.seq)
            .join(Sample, Sample.turn_id == Reward.turn_id)
            .join(Batch, Batch.id == Sample.batch_id)
            .where(Reward.turn_id.in_(chunk), Reward.weight > 0, Sample.uses_feedback, Feedback.batch_id.is_(None))
            .where(*conditions)
            .subquery()
            .c
        )
        is_first = (Feedback.seq == used.seq, used.place == 1)
        await session.execute(update(Feedback).where(*is_first).values(batch_id=used.batch_id))


async def _free_feedback(session: AsyncSession, batch_ids: Collection[str]) -> None:
    await session.execute(update(Feedback).where(Feedback.batch_id.in_(batch_ids)).values(batch_id=None))


async def _free_feedback_on(session: AsyncSession, turn_ids: Collection[str], batch_ids: Collection[str]) -> None:
    """Free the feedback on these turns that no other sample of the batches uses; there are no more than a step has."""
    on_turns = select(Reward.feedback_seq).where(Reward.turn_id.in_(turn_ids), Reward.feedback_seq.is_not(None))
    is_used = exists().where(
        Reward.feedback_seq == Feedback.seq, Sample.turn_id == Reward.turn_id, Sample.batch_id.in_(batch_ids)
    )
    is_free = (Feedback.batch_id.in_(batch_ids), Feedback.seq.in_(on_turns), ~is_used.correlate(Feedback))
    await session.execute(update(Feedback).where(*is_free).values(batch_id=None))
