"""Queries on one data subject: turns, feedback, pins and raters."""

from collections.abc import Collection
from typing import Any, NamedTuple

from sqlalchemy import CompoundSelect, Select, and_, exists, func, or_, select, union, union_all
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import aliased

from app.models import (
    Audit,
    AuditAction,
    Feedback,
    FeedbackRank,
    Judgement,
    Origin,
    Pin,
    PinKind,
    Rater,
    Reward,
    Sample,
    Turn,
)
from app.privacy.identities import SubjectNames


class SubjectRecords(NamedTuple):
    """The ids of the subject's turns, the latest first, and the sequence numbers of the feedback that names them.

    The order puts every turn before the turns that it continues.
    """

    turns: list[str]
    feedback: list[int]

    def __bool__(self) -> bool:
        return bool(self.turns or self.feedback)


def select_turns(names: SubjectNames) -> CompoundSelect[Any]:
    """Return a query for the ids of the subject's turns.

    These are the turns that name the subject; the turns without an end user that continue one of them, because their
    messages contain its messages; and the group samples and shadow replies of all of these.
    """
    mine = select(Turn.id).where(names.turns_filter(), Turn.deleted_at.is_(None)).cte("mine", recursive=True)
    child = aliased(Turn)
    continued = (
        select(child.id)
        .join(mine, child.parent_id == mine.c.id)
        .where(child.end_user.is_(None), child.deleted_at.is_(None), child.project_id == names.project_id)
    )
    chats = select(mine.union(continued).c.id)
    existing = select(Turn.id).where(Turn.project_id == names.project_id, Turn.deleted_at.is_(None))
    group_samples = existing.where(Turn.completion_id.in_(chats), Turn.origin == Origin.GROUP_SAMPLE)
    shadow_replies = existing.where(Turn.shadow_of_id.in_(chats))
    return union(chats, group_samples, shadow_replies)  # one statement with OR would use no index


def select_pins(names: SubjectNames) -> Select[Pin]:
    """Return a query for the pins of the subject and of the subject's conversations."""
    conversations = select(Turn.conversation_id).where(
        Turn.id.in_(select_turns(names)), Turn.conversation_id.is_not(None)
    )
    of_user = and_(Pin.kind == PinKind.USER, Pin.subject.in_(names.end_users))
    of_conversation = and_(Pin.kind == PinKind.CONVERSATION, Pin.subject.in_(conversations))
    query = select(Pin).where(Pin.project_id == names.project_id, or_(of_user, of_conversation))
    return query.order_by(Pin.created_at, Pin.id)


async def find_records(session: AsyncSession, names: SubjectNames) -> SubjectRecords:
    turn_ids = await session.scalars(
        select(Turn.id).where(Turn.id.in_(select_turns(names))).order_by(Turn.created_at.desc(), Turn.id.desc())
    )
    seqs = await session.scalars(select(Feedback.seq).where(names.feedback_filter()).order_by(Feedback.seq))
    return SubjectRecords(list(turn_ids), list(seqs))


async def last_erased_at(session: AsyncSession, names: SubjectNames) -> float | None:
    """Return when a subject of this id was last erased, if it was."""
    query = select(func.max(Audit.created_at)).where(
        Audit.project_id == names.project_id, Audit.action == AuditAction.SUBJECT_ERASED, Audit.subject == names.sha256
    )
    return await session.scalar(query)


async def lock_feedback(
    session: AsyncSession, names: SubjectNames, turn_ids: Collection[str], seqs: Collection[int]
) -> list[Feedback]:
    """Lock and return the feedback with these sequence numbers, and all feedback on these turns.

    Feedback on a whole conversation is included if these are the conversation's last turns.
    """
    remaining = aliased(Turn)
    has_remaining = exists().where(
        remaining.project_id == Turn.project_id,
        remaining.conversation_id == Turn.conversation_id,
        remaining.deleted_at.is_(None),
        remaining.id.not_in(turn_ids),
    )
    ended = select(Turn.conversation_id).where(Turn.id.in_(turn_ids), Turn.conversation_id.is_not(None), ~has_remaining)
    queries = (
        select(Feedback.seq).where(Feedback.turn_id.in_(turn_ids)),
        select(FeedbackRank.feedback_seq).where(FeedbackRank.turn_id.in_(turn_ids)),
        select(Feedback.seq).where(
            Feedback.project_id == names.project_id, Feedback.turn_id.is_(None), Feedback.conversation_id.in_(ended)
        ),
        select(Feedback.seq).where(Feedback.seq.in_(seqs)),
    )
    rows = select(Feedback).where(Feedback.project_id == names.project_id, Feedback.seq.in_(union_all(*queries)))
    return list(await session.scalars(rows.order_by(Feedback.seq).with_for_update()))


async def list_raters(session: AsyncSession, names: SubjectNames) -> list[Rater]:
    query = select(Rater).where(Rater.project_id == names.project_id, Rater.name.in_(names.raters))
    return list(await session.scalars(query.order_by(Rater.name)))


async def has_other_records(session: AsyncSession, names: SubjectNames) -> bool:
    """Whether the subject has a rater or a pin."""
    if await list_raters(session, names):
        return True
    return await session.scalar(select_pins(names).limit(1)) is not None


async def count_records(session: AsyncSession, names: SubjectNames) -> dict[str, int]:
    """Return the number of rows by kind. `feedback` counts the subject's, and others' on the subject's turns."""
    ids = select_turns(names)
    ranked = select(FeedbackRank.feedback_seq).where(FeedbackRank.turn_id.in_(ids))
    feedback = or_(names.feedback_filter(), Feedback.turn_id.in_(ids), Feedback.seq.in_(ranked))
    queries = {
        "turns": select(func.count()).select_from(Turn).where(Turn.id.in_(ids)),
        "feedback": select(func.count()).select_from(Feedback).where(Feedback.project_id == names.project_id, feedback),
        "rewards": select(func.count()).select_from(Reward).where(Reward.turn_id.in_(ids)),
        "judgements": select(func.count()).select_from(Judgement).where(Judgement.turn_id.in_(ids)),
        "samples": select(func.count()).select_from(Sample).where(Sample.turn_id.in_(ids)),
        "pins": select(func.count()).select_from(select_pins(names).order_by(None).subquery()),
    }
    return {name: int(await session.scalar(query) or 0) for name, query in queries.items()}
