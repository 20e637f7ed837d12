"""The votes of policies, counted by outcome, and how late they came."""

from collections import Counter
from collections.abc import Collection
from itertools import accumulate
from typing import Any, NamedTuple

from sqlalchemy import ColumnElement, Select, and_, bindparam, case, func, literal, or_, select, union_all
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import aliased

from app.core.planner import prefer_indexes
from app.feedback.outcome_reasons import CODES, REASONS, Reason
from app.feedback.outcomes import BATCH_CONDITIONS, DECIDING_STATES, select_outcomes, to_code
from app.models import VOTE_KINDS, Batch, BatchState, Feedback, Policy, SourceKind, Turn, Version
from app.training.vote_totals import IS_UNCOUNTED_FROM_BOUND, IS_UNCOUNTED_VOTE, read_totals

MAX_DELAYS = 2000
MAX_BATCHES = 100
MAX_VERSIONS = 20  # that the votes are counted for one by one
MAX_WAITING = 2000  # votes of a project in no total that a page reads, the newest ones


class VoteCount(NamedTuple):
    """The number of votes of people, or of programs, with the same outcome."""

    policy_id: str
    is_person: bool
    reason: Reason
    num_votes: int


class LearnedCount(NamedTuple):
    """The number of votes of people, or of programs, that a version has learned from, and what became of that."""

    version: int
    is_person: bool
    reason: Reason
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


async def find_first_read(session: AsyncSession, project_id: str) -> int:
    """Return the `seq` of the first vote in no total that a page reads; 0 if there are no more than MAX_WAITING."""
    newest = select(Feedback.seq).where(Feedback.project_id == project_id, IS_UNCOUNTED_VOTE)
    last = list(await session.scalars(newest.order_by(Feedback.seq.desc()).offset(MAX_WAITING - 1).limit(2)))
    return last[0] if len(last) == 2 else 0


async def count_votes(
    session: AsyncSession, project_id: str, policy_ids: Collection[str], first_seq: int = 0
) -> list[VoteCount]:
    """Return the votes of these policies by outcome. The sum of the counts is the number of votes.

    The session is one of `Database.read_snapshot`: votes become totals at any time, and each is counted once.
    Votes are feedback of the VOTE_KINDS: comments are none, and neither are withdrawals. Votes whose outcome is settled
    are read as totals (`app.feedback.settled_votes`), so only those that wait, and the latest ones, are read as rows.

    Args:
        first_seq: Of `find_first_read`: older votes that are in no total are left out, but for those in the newest
            MAX_VERSIONS batches of each policy. 0: none is.
    """
    num_votes: Counter[tuple[str, bool, Reason]] = Counter()
    for policy_id, reason, is_human, count in await read_totals(session, policy_ids):
        num_votes[policy_id, is_human, Reason(reason)] += count
    await prefer_indexes(session)
    broken_up = await _broken_up(session, project_id, first_seq)
    query = _count_uncounted(broken_up) if broken_up else _COUNT_UNCOUNTED
    parameters = {"project_id": project_id, "policy_ids": list(policy_ids), "first_seq": first_seq}
    rows = list(await session.execute(query, parameters))
    if first_seq:
        batch_ids = [id for policy_id in policy_ids for id in await _list_newest_batches(session, policy_id)]
        rows += await session.execute(
            _COUNT_OLDER, {"policy_ids": list(policy_ids), "first_seq": first_seq, "batch_ids": batch_ids}
        )
    for policy_id, is_human, code, count in rows:
        num_votes[policy_id, bool(is_human), REASONS[code]] += count
    return [VoteCount(*key, count) for key, count in num_votes.items() if count]


def _count_in_batches(*conditions: ColumnElement[bool]) -> Select[str, bool, int, int]:
    """Return a query of (policy id, whether they are of people, code, number) of votes in no total, but in a batch.

    Its parameters are `policy_ids` and those of the conditions. The batch alone decides the outcome, so the votes are
    counted by batch, without their replies.
    """
    policy_ids: ColumnElement[str] = bindparam("policy_ids", expanding=True)
    is_person = (Feedback.source_kind == SourceKind.HUMAN).label("is_person")
    is_vote = (IS_UNCOUNTED_FROM_BOUND, Feedback.batch_id.is_not(None))
    in_batch = select(Feedback.batch_id, is_person, func.count().label("num_votes"))
    votes = in_batch.where(*is_vote, *conditions).group_by(Feedback.batch_id, is_person).subquery()
    return (
        select(Batch.policy_id, votes.c.is_person, to_code(BATCH_CONDITIONS), votes.c.num_votes)
        .join(votes, votes.c.batch_id == Batch.id)
        .outerjoin(Version, Version.id == Batch.version_id)
        .where(Batch.state.in_(DECIDING_STATES), Batch.policy_id.in_(policy_ids))
    )


def _count_uncounted(broken_up: Collection[str]) -> Any:
    """Return a query of (policy id, whether they are of people, code, number) of the votes that are in no total.

    Its parameters are `project_id`, `policy_ids` and `first_seq`.
    """
    project_id: ColumnElement[str] = bindparam("project_id")
    policy_ids: ColumnElement[str] = bindparam("policy_ids", expanding=True)
    is_read = Feedback.seq >= bindparam("first_seq")
    is_unsettled: ColumnElement[bool] = Feedback.batch_id.is_(None)
    if broken_up:  # not in the statement otherwise: the planner would expect far too many votes
        is_unsettled = or_(is_unsettled, Feedback.batch_id.in_(broken_up))
    outcomes = select_outcomes(project_id, and_(is_unsettled, IS_UNCOUNTED_FROM_BOUND, is_read)).subquery().c
    unsettled: Any = (
        select(outcomes.reply_policy_id, outcomes.source_kind == SourceKind.HUMAN, outcomes.code, func.count())
        .where(outcomes.reply_policy_id.in_(policy_ids))
        .group_by(outcomes.reply_policy_id, outcomes.source_kind, outcomes.code)
    )
    return union_all(_count_in_batches(Feedback.project_id == project_id, is_read), unsettled)


# Built once: that takes as long as the query itself.
_COUNT_UNCOUNTED = _count_uncounted(())
_COUNT_OLDER = _count_in_batches(  # without the project, by whose index SQLite would read all older votes
    Feedback.seq < bindparam("first_seq"), Feedback.batch_id.in_(bindparam("batch_ids", expanding=True))
)


async def _broken_up(session: AsyncSession, project_id: str, first_seq: int) -> list[str]:
    """Return the batches of votes in no total that decide nothing, because they were broken up."""
    is_vote = (Feedback.project_id == project_id, IS_UNCOUNTED_FROM_BOUND, Feedback.seq >= first_seq)
    query = select(Batch.id).join(Feedback, Feedback.batch_id == Batch.id).distinct()
    return sorted(await session.scalars(query.where(*is_vote, Batch.state.not_in(DECIDING_STATES))))


async def _list_newest_batches(session: AsyncSession, policy_id: str) -> list[str]:
    newest = select(Batch.id).where(Batch.policy_id == policy_id, Batch.state.in_(DECIDING_STATES))
    newest = newest.order_by(Batch.created_at.desc(), Batch.id.desc()).limit(MAX_VERSIONS)
    return list(await session.scalars(newest))


async def count_by_version(session: AsyncSession, policy: Policy) -> list[LearnedCount]:
    """Return the votes that the newest MAX_VERSIONS trained versions of the policy have learned from, newest first.

    Of each version the votes of people come first.
    """
    trained = (Version.policy_id == policy.id, Version.batch_id.is_not(None))
    newest = select(Version.id).where(*trained).order_by(Version.number.desc()).limit(MAX_VERSIONS)
    is_person = Feedback.source_kind == SourceKind.HUMAN
    code = to_code(BATCH_CONDITIONS)
    query = (
        select(Version.number, is_person, code, func.count())
        .join(Batch, Batch.version_id == Version.id)
        .join(Feedback, Feedback.batch_id == Batch.id)
        .where(Version.id.in_(newest), Batch.id == Version.batch_id, Batch.state.in_(DECIDING_STATES))
        .where(Feedback.kind.in_(VOTE_KINDS))
        .group_by(Version.number, is_person, code)
    )
    await prefer_indexes(session)
    rows = await session.execute(query)
    counts = (LearnedCount(number, bool(is_human), REASONS[code], count) for number, is_human, code, count in rows)
    return sorted(counts, key=lambda count: (-count.version, not count.is_person, count.reason))


async def measure_delays(session: AsyncSession, policy: Policy) -> Delays:
    """Return the delays and the staleness of the policy's votes that were learned from.

    They are exact quantiles of the votes in the newest batches: so many of these that they have MAX_DELAYS samples.
    """
    batch_ids = await _newest_batches(session, policy)
    if not batch_ids:
        return Delays(None, None, None, None)
    is_recent = and_(Feedback.batch_id.in_(batch_ids), Feedback.kind.in_(VOTE_KINDS))
    # Most votes are on one turn. Their batch alone decides, so their other outcomes are not computed.
    of_turns: Any = (
        select(to_code(BATCH_CONDITIONS).label("code"), Feedback.created_at)
        .add_columns(Turn.finished_at, Batch.parent_id, Turn.version_id.label("reply_version_id"))
        .join(Turn, Turn.id == Feedback.turn_id)
        .join(Batch, Batch.id == Feedback.batch_id)
        .outerjoin(Version, Version.id == Batch.version_id)
        .where(is_recent)
    )
    seqs = list(await session.scalars(select(Feedback.seq).where(is_recent, Feedback.turn_id.is_(None))))
    if seqs:
        others = select_outcomes(literal(policy.project_id), Feedback.seq.in_(seqs)).subquery().c
        of_several: Any = select(
            others.code, others.created_at, others.finished_at, others.parent_id, others.reply_version_id
        ).where(others.policy_id == policy.id)
        of_turns = union_all(of_turns, of_several)
    in_batches = of_turns.subquery().c
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
    await prefer_indexes(session)
    row = (await session.execute(select(*quantiles))).one()
    return Delays(*(None if value is None else max(0.0, value) for value in row))


async def _newest_batches(session: AsyncSession, policy: Policy) -> list[str]:
    """Return the newest trained batches of the policy that have MAX_DELAYS samples together."""
    trained = (Batch.policy_id == policy.id, Batch.state == BatchState.TRAINED)
    newest_first = select(Batch.id, Batch.num_samples).order_by(Batch.created_at.desc(), Batch.id.desc())
    rows = (await session.execute(newest_first.where(*trained).limit(MAX_BATCHES))).all()
    before = accumulate((row.num_samples for row in rows), initial=0)
    return [row.id for row, num_samples in zip(rows, before, strict=False) if num_samples < MAX_DELAYS]
