"""Rows of one part of an erasure → gone, or emptied where their number or their place is still needed."""

from collections.abc import Collection, Sequence
from typing import Any

from sqlalchemy import case, delete, or_, select, tuple_, update
from sqlalchemy.ext.asyncio import AsyncSession

from app.chat import repository as chats
from app.deployments.pins.service import PINNED, whose
from app.feedback.schemas import WITHDRAWAL
from app.models import (
    Audit,
    Feedback,
    FeedbackRank,
    Judgement,
    JudgementState,
    Pin,
    PinKind,
    Rater,
    Reward,
    Sample,
    Turn,
    TurnState,
    new_id,
)
from app.privacy.identities import Names
from app.raters import names as rater_names
from app.training.unlearning import ERASED


async def rewards(session: AsyncSession, names: Names, own: Collection[str], touched: Collection[str]) -> int:
    """All of their own turns; of others' turns those that they gave."""
    theirs = Reward.turn_id.in_(touched) & Reward.rater.in_(names.raters)
    gone = await session.execute(
        delete(Reward).where(or_(Reward.turn_id.in_(own), theirs)).execution_options(synchronize_session=False)
    )
    return int(gone.rowcount)  # type: ignore[attr-defined]


async def words(session: AsyncSession, project_id: str, said: Sequence[Feedback], touched: Collection[str]) -> None:
    """Whole rows, with their idempotency keys. What is left behind on others' turns says only that they are to be
    judged anew."""
    seqs = [row.seq for row in said]
    await session.execute(delete(FeedbackRank).where(FeedbackRank.feedback_seq.in_(seqs)))
    await session.execute(delete(Feedback).where(Feedback.seq.in_(seqs)).execution_options(synchronize_session=False))
    for row in said:
        session.expunge(row)  # SQLite gives the last numbers out again
    for turn_id in sorted(touched):
        session.add(
            Feedback(
                id=new_id("fb"),
                project_id=project_id,
                turn_id=turn_id,
                target=turn_id,
                kind=WITHDRAWAL,
                name=ERASED,
                source_kind="CODE",
                request_metadata={"withdraws": None},
                idempotency_key=new_id("auto"),
                fingerprint="",
            )
        )
    await session.flush()


async def judgements(session: AsyncSession, own: Collection[str], parents: Collection[str]) -> None:
    """An answer may quote what it judged; one about the turn before may quote what came after it."""
    emptied: dict[str, Any] = {
        "details": {},
        "reason": None,
        "state": case((Judgement.state == JudgementState.OPEN, JudgementState.SKIPPED), else_=Judgement.state),
        "fence": Judgement.fence + 1,
        "lease_owner": None,
        "lease_until": None,
    }
    asked: list[tuple[Collection[str], dict[str, Any]]] = [(parents, {}), (own, {"value": None})]
    for turn_ids, more in asked:
        await session.execute(
            update(Judgement)
            .where(Judgement.turn_id.in_(turn_ids))
            .values(**emptied, **more)
            .execution_options(synchronize_session=False)
        )


async def turns(session: AsyncSession, project_id: str, own: Sequence[Turn]) -> None:
    """As one completion is deleted; and no name of theirs, no stop string, stays with it."""
    for is_open in (True, False):
        alike = [turn for turn in own if (turn.state == TurnState.OPEN) is is_open]
        if alike:
            await chats.erase(session, alike)
    named = {turn.conversation_id for turn in own} - {None}
    emptied: dict[str, Any] = {"conversation_id": None, "sampling": {}, "prefix_reuse": None}
    mine = or_(Turn.id.in_([turn.id for turn in own]), Turn.conversation_id.in_(named))
    await session.execute(
        update(Turn)
        .where(Turn.project_id == project_id, mine, Turn.deleted_at.is_not(None))
        .values(**emptied)
        .execution_options(synchronize_session=False)
    )


async def over(session: AsyncSession, project_id: str, own: Sequence[Turn]) -> set[str]:
    """Conversations of which nothing is left."""
    talks = {turn.conversation_id for turn in own if turn.conversation_id is not None}
    left = await session.scalars(
        select(Turn.conversation_id).where(
            Turn.project_id == project_id,
            Turn.conversation_id.in_(talks),
            Turn.deleted_at.is_(None),
            Turn.id.not_in([turn.id for turn in own]),
        )
    )
    return talks - set(left)


async def raters(session: AsyncSession, names: Names, own: Sequence[Turn], over: Collection[str]) -> None:
    """As whom they have spoken: by name, or as the voice of a conversation that is over."""
    nameless = [rater_names.of_conversation(one) for one in over] + [rater_names.of_turn(turn.id) for turn in own]
    await session.execute(
        delete(Rater)
        .where(Rater.project_id == names.project_id, Rater.name.in_([*names.raters, *nameless]))
        .execution_options(synchronize_session=False)
    )


async def pins(session: AsyncSession, names: Names, over: Collection[str]) -> int:
    """On them, and on conversations that are over. An admin's reason may name them, also that of an earlier pin."""
    held = [(PinKind.USER, name) for name in names.end_users] + [(PinKind.CONVERSATION, one) for one in over]
    gone = await session.execute(
        delete(Pin)
        .where(Pin.project_id == names.project_id, tuple_(Pin.kind, Pin.subject).in_(held))
        .execution_options(synchronize_session=False)
    )
    masks = [whose(names.project_id, kind, subject) for kind, subject in held]
    await session.execute(
        update(Audit)
        .where(
            Audit.project_id == names.project_id, Audit.action == PINNED, Audit.details["whose"].as_string().in_(masks)
        )
        .values(reason=None, details={})
        .execution_options(synchronize_session=False)
    )
    return int(gone.rowcount)  # type: ignore[attr-defined]


async def mentions(session: AsyncSession, names: Names, touched: Collection[str]) -> None:
    """Where others' rows speak of them: samples that waited for their word, what admins did about them."""
    await session.execute(
        update(Sample)
        .where(Sample.turn_id.in_(touched), Sample.rater.in_(names.raters))
        .values(rater=None)
        .execution_options(synchronize_session=False)
    )
    await session.execute(
        update(Audit)
        .where(
            Audit.project_id == names.project_id, Audit.subject.in_([name[:128] for name in (names.id, *names.raters)])
        )
        .values(subject=names.sha256, reason=None, details={})
        .execution_options(synchronize_session=False)
    )
