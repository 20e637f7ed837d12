"""Queries of what leaves: turns and feedback, page by page."""

from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import ColumnElement, Row, and_, exists, or_, select, tuple_
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import load_only

from app.feedback.effective import is_effective
from app.feedback.kinds import ORDERS
from app.models import Feedback, FeedbackRank, Origin, Policy, Turn, TurnState, Version

CORRECTION = "correction"


@dataclass(frozen=True)
class Wanted:
    """Which rows leave. None: all of them."""

    project_id: str
    policy_id: str | None = None
    version: int | None = None
    since: float | None = None
    until: float | None = None
    trainable: bool | None = None
    with_feedback: bool | None = None


def trainable() -> ColumnElement[bool]:
    return and_(Turn.exclusion_reason.is_(None), Turn.state != TurnState.OPEN, Turn.output_ids.is_not(None))


def judged() -> ColumnElement[bool]:
    """Is there feedback that counts on this Turn?"""
    ranked = select(FeedbackRank.turn_id).join(Feedback, Feedback.seq == FeedbackRank.feedback_seq)
    return or_(
        exists().where(Feedback.turn_id == Turn.id, is_effective()),
        ranked.where(FeedbackRank.turn_id == Turn.id, is_effective()).exists(),
    )


async def turns_after(
    session: AsyncSession, wanted: Wanted, last: tuple[float, str] | None, limit: int
) -> Sequence[Row[Turn, str, int]]:
    """The next turns with their policy's name and version's number, oldest first."""
    query = (
        select(Turn, Policy.name, Version.number)
        .join(Policy, Policy.id == Turn.policy_id)
        .join(Version, Version.id == Turn.version_id)
        .where(*_conditions(wanted))
        .order_by(Turn.created_at, Turn.id)
        .limit(limit)
    )
    if last is not None:
        query = query.where(tuple_(Turn.created_at, Turn.id) > last)
    return (await session.execute(query)).all()


def _conditions(wanted: Wanted) -> list[ColumnElement[bool]]:
    conditions = [Turn.project_id == wanted.project_id, Turn.deleted_at.is_(None), Turn.origin == Origin.CHAT]
    if wanted.policy_id is not None:
        conditions.append(Turn.policy_id == wanted.policy_id)
    if wanted.version is not None:
        conditions.append(Version.number == wanted.version)
    if wanted.since is not None:
        conditions.append(Turn.created_at >= wanted.since)
    if wanted.until is not None:
        conditions.append(Turn.created_at < wanted.until)
    if wanted.trainable is not None:
        conditions.append(trainable() if wanted.trainable else ~trainable())
    if wanted.with_feedback is not None:
        conditions.append(judged() if wanted.with_feedback else ~judged())
    return conditions


async def said_of(
    session: AsyncSession, project_id: str, turn_ids: Sequence[str]
) -> dict[str, list[tuple[Feedback, bool]]]:
    """Feedback by turn in order of arrival, each with whether it counts; that of rankings is with all their turns."""
    mark = is_effective().label("counts")
    direct = select(Feedback.turn_id, Feedback, mark).where(Feedback.turn_id.in_(turn_ids))
    ranked = (
        select(FeedbackRank.turn_id, Feedback, mark)
        .join(Feedback, Feedback.seq == FeedbackRank.feedback_seq)
        .where(FeedbackRank.turn_id.in_(turn_ids))
    )
    found: dict[str, dict[int, tuple[Feedback, bool]]] = {id: {} for id in turn_ids}
    for query in (direct, ranked):
        for turn_id, feedback, counting in await session.execute(query.where(Feedback.project_id == project_id)):
            found[str(turn_id)][feedback.seq] = (feedback, bool(counting))
    return {id: [rows[seq] for seq in sorted(rows)] for id, rows in found.items()}


async def preferring_after(session: AsyncSession, wanted: Wanted, last: int, limit: int) -> Sequence[Feedback]:
    """The next feedback that counts and says which of two answers is better."""
    query = select(Feedback).where(
        Feedback.project_id == wanted.project_id,
        Feedback.kind.in_((*ORDERS, CORRECTION)),
        Feedback.seq > last,
        is_effective(),
    )
    if wanted.since is not None:
        query = query.where(Feedback.created_at >= wanted.since)
    if wanted.until is not None:
        query = query.where(Feedback.created_at < wanted.until)
    return (await session.scalars(query.order_by(Feedback.seq).limit(limit))).all()


async def ranks_of(session: AsyncSession, seqs: Sequence[int]) -> dict[int, list[FeedbackRank]]:
    found: dict[int, list[FeedbackRank]] = {seq: [] for seq in seqs}
    for row in await session.scalars(
        select(FeedbackRank).where(FeedbackRank.feedback_seq.in_(seqs)).order_by(FeedbackRank.rank)
    ):
        found[row.feedback_seq].append(row)
    return found


async def answers(session: AsyncSession, wanted: Wanted, turn_ids: set[str]) -> dict[str, Turn]:
    """The turns that still have something to say."""
    query = (
        select(Turn)
        .where(Turn.id.in_(turn_ids), Turn.project_id == wanted.project_id, Turn.deleted_at.is_(None))
        .options(load_only(Turn.id, Turn.policy_id, Turn.messages, Turn.reply))
    )
    if wanted.policy_id is not None:
        query = query.where(Turn.policy_id == wanted.policy_id)
    return {turn.id: turn for turn in await session.scalars(query) if turn.reply}
