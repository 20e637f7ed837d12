"""The votes of policies, counted by outcome, and how late they came."""

from collections import Counter
from collections.abc import Collection
from typing import Any, NamedTuple

from sqlalchemy import ColumnElement, and_, case, exists, func, literal, null, or_, select, text, union_all
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import aliased

from app.feedback.outcomes import BATCH_CONDITIONS, CODES, DECIDING_STATES, REASONS, Reason, select_outcomes, to_code
from app.models import VOTE_KINDS, Batch, Feedback, Policy, SourceKind, Turn, Version

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
    is_person = (Feedback.source_kind == SourceKind.HUMAN).label("is_person")
    is_vote = (Feedback.project_id == project_id, Feedback.kind.in_(VOTE_KINDS))
    in_batch = select(Feedback.batch_id, is_person, func.count().label("num_votes"))
    by_batch = in_batch.where(*is_vote, Feedback.batch_id.is_not(None)).group_by(Feedback.batch_id, is_person)
    votes = by_batch.subquery()
    of_policies = Batch.policy_id.in_(policy_ids)
    settled: Any = (
        select(Batch.policy_id, votes.c.is_person, to_code(BATCH_CONDITIONS), Version.number, votes.c.num_votes)
        .join(votes, votes.c.batch_id == Batch.id)
        .outerjoin(Version, Version.id == Batch.version_id)
        .where(Batch.state.in_(DECIDING_STATES), of_policies)
    )
    has_votes = exists().where(Feedback.batch_id == Batch.id)
    broken_up = list(
        await session.scalars(select(Batch.id).where(of_policies, Batch.state.not_in(DECIDING_STATES), has_votes))
    )
    is_unsettled: ColumnElement[bool] = Feedback.batch_id.is_(None)
    if broken_up:  # not in the statement otherwise: the planner would expect far too many votes
        is_unsettled = or_(is_unsettled, Feedback.batch_id.in_(broken_up))
    outcomes = select_outcomes(literal(project_id), and_(is_unsettled, Feedback.kind.in_(VOTE_KINDS))).subquery().c
    unsettled: Any = (
        select(outcomes.reply_policy_id, outcomes.source_kind == SourceKind.HUMAN, outcomes.code, null(), func.count())
        .where(outcomes.reply_policy_id.in_(policy_ids))
        .group_by(outcomes.reply_policy_id, outcomes.source_kind, outcomes.code)
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
    oldest_seq = await session.scalar(newest) or 0  # a statement of its own, so that the planner knows the value
    is_recent = and_(Feedback.seq >= oldest_seq, Feedback.batch_id.is_not(None), Feedback.kind.in_(VOTE_KINDS))
    # Most votes are on one turn. Their batch alone decides, so their other outcomes are not computed.
    of_turns: Any = (
        select(to_code(BATCH_CONDITIONS).label("code"), Feedback.created_at)
        .add_columns(Turn.finished_at, Batch.parent_id, Turn.version_id.label("reply_version_id"))
        .join(Turn, Turn.id == Feedback.turn_id)
        .join(Batch, Batch.id == Feedback.batch_id)
        .outerjoin(Version, Version.id == Batch.version_id)
        .where(Feedback.project_id == policy.project_id, is_recent, Batch.policy_id == policy.id)
    )
    others = select_outcomes(literal(policy.project_id), and_(is_recent, Feedback.turn_id.is_(None))).subquery().c
    of_several: Any = select(
        others.code, others.created_at, others.finished_at, others.parent_id, others.reply_version_id
    ).where(others.policy_id == policy.id)
    in_batches = union_all(of_turns, of_several).subquery().c
    parent, behavior = aliased(Version), aliased(Version)
    votes: Any = (
        select(in_batches.code, (parent.number - behavior.number).label("staleness"))
        .add_columns(
            (in_batches.created_at - func.coalesce(in_batches.finished_at, in_batches.created_at)).label("delay")
        )
        .join(parent, parent.id == in_batches.parent_id)
        .join(behavior, behavior.id == in_batches.reply_version_id)
        .cte("votes")
        .prefix_with("MATERIALIZED")  # with the condition on the code the planner would expect far too few votes
    )
    is_learned = votes.c.code == CODES[Reason.LEARNED]
    columns = (votes.c.delay, votes.c.staleness)
    positions = [func.row_number().over(order_by=column).label(f"{column.name}_position") for column in columns]
    ranked = select(*columns, *positions, func.count().over().label("num_votes")).where(is_learned).subquery().c
    middle, p90 = (ranked.num_votes + 1) // 2, (9 * ranked.num_votes + 9) // 10  # rounded up
    quantiles = [
        func.max(case((position == quantile, value)))
        for value, position in ((ranked.delay, ranked.delay_position), (ranked.staleness, ranked.staleness_position))
        for quantile in (middle, p90)
    ]
    await _disable_jit(session)
    row = (await session.execute(select(*quantiles))).one()
    return Delays(*(None if value is None else max(0.0, value) for value in row))


async def _disable_jit(session: AsyncSession) -> None:
    """Turn off PostgreSQL's compilation of statements for this transaction: it takes longer than these statements."""
    if session.get_bind().dialect.name == "postgresql":
        await session.execute(text("SET LOCAL jit = off"))
