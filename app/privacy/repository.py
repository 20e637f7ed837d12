"""Queries on one subject: their turns, their words, what they left elsewhere."""

from collections.abc import Collection
from typing import Any, NamedTuple

from sqlalchemy import CompoundSelect, Select, and_, exists, func, or_, select, union, union_all
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import aliased

from app.models import Audit, Feedback, FeedbackRank, Judgement, Origin, Pin, PinKind, Rater, Reward, Sample, Turn
from app.privacy.identities import Names

ERASED = "erase subject"  # of the audit


class Found(NamedTuple):
    """Ids of turns, the latest first: what goes on from a turn goes before it. And what feedback names them."""

    turns: list[str]
    words: list[int]

    def __bool__(self) -> bool:
        return bool(self.turns or self.words)


def turns_of(names: Names) -> CompoundSelect[Any]:
    """Turns that name them, and those without a name that go on from such a turn: their messages hold its messages.
    And the rollouts beside any of these."""
    mine = select(Turn.id).where(names.asked(), Turn.deleted_at.is_(None)).cte("mine", recursive=True)
    after = aliased(Turn)
    followed = select(after.id).join(mine, after.parent_id == mine.c.id)
    nameless = followed.where(
        after.end_user.is_(None), after.deleted_at.is_(None), after.project_id == names.project_id
    )
    named = select(mine.union(nameless).c.id)
    there = select(Turn.id).where(Turn.project_id == names.project_id, Turn.deleted_at.is_(None))
    group_samples = there.where(Turn.completion_id.in_(named), Turn.origin == Origin.GROUP_SAMPLE)
    return union(
        named, group_samples, there.where(Turn.shadow_of_id.in_(named))
    )  # one statement with OR would use no index


def pins_of(names: Names) -> Select[Pin]:
    """Pins that hold them, or a conversation of theirs."""
    talks = select(Turn.conversation_id).where(Turn.id.in_(turns_of(names)), Turn.conversation_id.is_not(None))
    held = and_(Pin.kind == PinKind.USER, Pin.subject.in_(names.end_users))
    talk = and_(Pin.kind == PinKind.CONVERSATION, Pin.subject.in_(talks))
    return select(Pin).where(Pin.project_id == names.project_id, or_(held, talk)).order_by(Pin.created_at, Pin.id)


async def found(session: AsyncSession, names: Names) -> Found:
    ids = await session.scalars(
        select(Turn.id).where(Turn.id.in_(turns_of(names))).order_by(Turn.created_at.desc(), Turn.id.desc())
    )
    words = await session.scalars(select(Feedback.seq).where(names.said()).order_by(Feedback.seq))
    return Found(list(ids), list(words))


async def erased_at(session: AsyncSession, names: Names) -> float | None:
    """When this name was erased, if it was."""
    rows = select(func.max(Audit.created_at)).where(
        Audit.project_id == names.project_id, Audit.action == ERASED, Audit.subject == names.sha256
    )
    return await session.scalar(rows)


async def words(
    session: AsyncSession, names: Names, turn_ids: Collection[str], seqs: Collection[int]
) -> list[Feedback]:
    """Locked: feedback about these turns, whoever said it, and these words. What was said of a conversation as a whole
    goes with its last turn."""
    left = aliased(Turn)
    others = exists().where(
        left.project_id == Turn.project_id,
        left.conversation_id == Turn.conversation_id,
        left.deleted_at.is_(None),
        left.id.not_in(turn_ids),
    )
    over = select(Turn.conversation_id).where(Turn.id.in_(turn_ids), Turn.conversation_id.is_not(None), ~others)
    ways = (
        select(Feedback.seq).where(Feedback.turn_id.in_(turn_ids)),
        select(FeedbackRank.feedback_seq).where(FeedbackRank.turn_id.in_(turn_ids)),
        select(Feedback.seq).where(
            Feedback.project_id == names.project_id, Feedback.turn_id.is_(None), Feedback.conversation_id.in_(over)
        ),
        select(Feedback.seq).where(Feedback.seq.in_(seqs)),
    )
    rows = select(Feedback).where(Feedback.project_id == names.project_id, Feedback.seq.in_(union_all(*ways)))
    return list(await session.scalars(rows.order_by(Feedback.seq).with_for_update()))


async def raters(session: AsyncSession, names: Names) -> list[Rater]:
    rows = select(Rater).where(Rater.project_id == names.project_id, Rater.name.in_(names.raters))
    return list(await session.scalars(rows.order_by(Rater.name)))


async def on_record(session: AsyncSession, names: Names) -> bool:
    """Is anything known of them beside turns and words?"""
    if await raters(session, names):
        return True
    return await session.scalar(pins_of(names).limit(1)) is not None


async def counts(session: AsyncSession, names: Names) -> dict[str, int]:
    """What is on record. `feedback` is theirs, or about their turns."""
    ids = turns_of(names)
    ranked = select(FeedbackRank.feedback_seq).where(FeedbackRank.turn_id.in_(ids))
    said = or_(names.said(), Feedback.turn_id.in_(ids), Feedback.seq.in_(ranked))
    asked = {
        "turns": select(func.count()).select_from(Turn).where(Turn.id.in_(ids)),
        "feedback": select(func.count()).select_from(Feedback).where(Feedback.project_id == names.project_id, said),
        "rewards": select(func.count()).select_from(Reward).where(Reward.turn_id.in_(ids)),
        "judgements": select(func.count()).select_from(Judgement).where(Judgement.turn_id.in_(ids)),
        "samples": select(func.count()).select_from(Sample).where(Sample.turn_id.in_(ids)),
        "pins": select(func.count()).select_from(pins_of(names).order_by(None).subquery()),
    }
    return {name: int(await session.scalar(query) or 0) for name, query in asked.items()}
