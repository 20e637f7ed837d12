"""The votes of policies, counted by outcome, and how late they came."""

import math
from collections import Counter
from collections.abc import Collection
from typing import Any, NamedTuple

from sqlalchemy import and_, func, literal, null, or_, select, text, union_all
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import aliased

from app.feedback.outcomes import BATCH_CONDITIONS, CODES, REASONS, Reason, select_outcomes, to_code
from app.models import VOTE_KINDS, Batch, BatchState, Feedback, Policy, SourceKind, Version

MAX_DELAYS = 10_000


class VoteCount(NamedTuple):
    """The number of votes of people, or of programs, with the same outcome.

    `version` is the number of the version that learned from them, if one has.
    """

    policy_id: str
    is_person: bool
    reason: Reason
    version: int | None
    num_votes: int


class Delays(NamedTuple):
    """Quantiles of the votes that were learned from; None if there are none.

    The delay is the time from the end of the reply to the vote. The staleness is the number of updates between the
    version that gave the reply and the version that the batch was trained from.
    """

    median_delay: float | None
    p90_delay: float | None
    median_staleness: float | None
    p90_staleness: float | None


async def count_votes(session: AsyncSession, project_id: str, policy_ids: Collection[str]) -> list[VoteCount]:
    """Return the votes of these policies by outcome. The sum of the counts is the number of votes.

    Votes are feedback of the VOTE_KINDS: comments are none, and neither are withdrawals. The votes in a batch are most
    of all votes. They have the outcome of the batch, so they are counted by batch, without their replies.
    """
    is_settled = Batch.state.in_((BatchState.OPEN, BatchState.TRAINED))
    is_person = (Feedback.source_kind == SourceKind.HUMAN).label("is_person")
    is_vote = (Feedback.project_id == project_id, Feedback.kind.in_(VOTE_KINDS))
    in_batch = select(Feedback.batch_id, is_person, func.count().label("num_votes"))
    by_batch = in_batch.where(*is_vote, Feedback.batch_id.is_not(None)).group_by(Feedback.batch_id, is_person)
    votes = by_batch.subquery()
    settled: Any = (
        select(Batch.policy_id, votes.c.is_person, to_code(BATCH_CONDITIONS), Version.number, votes.c.num_votes)
        .join(votes, votes.c.batch_id == Batch.id)
        .outerjoin(Version, Version.id == Batch.version_id)
        .where(is_settled, Batch.policy_id.in_(policy_ids))
    )
    broken_up = select(Batch.id).where(Batch.policy_id.in_(policy_ids), ~is_settled)
    is_unsettled = or_(Feedback.batch_id.is_(None), Feedback.batch_id.in_(broken_up))
    condition = and_(is_unsettled, Feedback.kind.in_(VOTE_KINDS))
    outcomes = select_outcomes(literal(project_id), condition).subquery().c
    unsettled: Any = (
        select(outcomes.policy_id, outcomes.source_kind == SourceKind.HUMAN, outcomes.code, null(), func.count())
        .where(outcomes.policy_id.in_(policy_ids))
        .group_by(outcomes.policy_id, outcomes.source_kind, outcomes.code)
    )
    await _disable_jit(session)
    num_votes: Counter[tuple[str, bool, Reason, int | None]] = Counter()
    for policy_id, is_human, code, version, count in await session.execute(union_all(settled, unsettled)):
        num_votes[policy_id, bool(is_human), REASONS[code], version] += count
    return [VoteCount(*key, count) for key, count in num_votes.items()]


async def measure_delays(session: AsyncSession, policy: Policy) -> Delays:
    """Return the delays and the staleness of the policy's votes that were learned from.

    They are exact quantiles of the last MAX_DELAYS votes of the project that are in a batch.
    """
    in_batch = (Feedback.project_id == policy.project_id, Feedback.batch_id.is_not(None))
    newest = select(Feedback.seq).where(*in_batch).order_by(Feedback.seq.desc()).limit(1).offset(MAX_DELAYS - 1)
    is_recent = Feedback.seq >= func.coalesce(newest.scalar_subquery(), 0)
    parent, behavior = aliased(Version), aliased(Version)
    condition = and_(is_recent, Feedback.batch_id.is_not(None), Feedback.kind.in_(VOTE_KINDS))
    outcomes = select_outcomes(literal(policy.project_id), condition).subquery().c
    query: Any = (
        select(outcomes.created_at - func.coalesce(outcomes.finished_at, outcomes.created_at))
        .add_columns(parent.number - behavior.number)
        .join(parent, parent.id == outcomes.parent_id)
        .join(behavior, behavior.id == outcomes.reply_version_id)
        .where(outcomes.policy_id == policy.id, outcomes.code == CODES[Reason.LEARNED])
    )
    await _disable_jit(session)
    rows = list(await session.execute(query))
    if not rows:
        return Delays(None, None, None, None)
    delays, staleness = (sorted(max(0.0, value) for value in column) for column in zip(*rows, strict=True))
    middle, p90 = (len(rows) - 1) // 2, math.ceil(0.9 * len(rows)) - 1
    return Delays(delays[middle], delays[p90], staleness[middle], staleness[p90])


async def _disable_jit(session: AsyncSession) -> None:
    """Turn off PostgreSQL's compilation of statements for this transaction: it takes longer than these statements."""
    if session.get_bind().dialect.name == "postgresql":
        await session.execute(text("SET LOCAL jit = off"))
