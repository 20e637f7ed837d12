"""Deletes the rows of one chunk of an erasure, or empties those that others refer to or count."""

from collections.abc import Collection, Sequence
from typing import NamedTuple

from sqlalchemy import ColumnElement, case, delete, insert, or_, select, tuple_, union_all, update
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.sql.dml import Delete, Update

from app.chat import repository as chats
from app.deployments.pins import subject_hash
from app.episodes import content as episode_content
from app.feedback.keyed_feedback import delete_keys
from app.feedback.schemas import WITHDRAWAL
from app.models import (
    Audit,
    AuditAction,
    Episode,
    Feedback,
    FeedbackRank,
    Judgement,
    JudgementState,
    Pin,
    PinKind,
    Rater,
    Reward,
    Sample,
    SourceKind,
    Turn,
    new_id,
)
from app.models.audit import RATER_ACTIONS
from app.privacy.subjects import SubjectNames
from app.raters import names as rater_names
from app.training.vote_totals import reopen_votes


async def _execute(session: AsyncSession, statement: Update | Delete) -> int:
    """Execute the statement and return the number of rows that it changed."""
    result = await session.execute(statement)
    return int(result.rowcount)  # type: ignore[attr-defined]


class EndedWholes(NamedTuple):
    """The conversations and the episodes that have no turns but those of a chunk."""

    conversations: set[str]
    episodes: set[str]


async def find_ended(session: AsyncSession, project_id: str, turns: Sequence[Turn]) -> EndedWholes:
    """Return the conversations and the episodes that have no turns but these."""
    ended: list[set[str]] = []
    for column in (Turn.conversation_id, Turn.episode_id):
        ids = {id for turn in turns if (id := getattr(turn, column.key)) is not None}
        remaining = await session.scalars(
            select(column).where(
                Turn.project_id == project_id,
                column.in_(ids),
                Turn.deleted_at.is_(None),
                Turn.id.not_in([turn.id for turn in turns]),
            )
        )
        ended.append(ids - set(remaining))
    return EndedWholes(*ended)


async def lock_feedback(
    session: AsyncSession, project_id: str, turn_ids: Collection[str], seqs: Collection[int], ended: EndedWholes
) -> list[Feedback]:
    """Lock and return the feedback with these numbers, on these turns, and on `ended` conversations and episodes."""
    queries = (
        select(Feedback.seq).where(Feedback.turn_id.in_(turn_ids)),
        select(FeedbackRank.feedback_seq).where(FeedbackRank.turn_id.in_(turn_ids)),
        select(Feedback.seq).where(
            Feedback.project_id == project_id,
            Feedback.turn_id.is_(None),
            Feedback.conversation_id.in_(ended.conversations),
        ),
        select(Feedback.seq).where(Feedback.project_id == project_id, Feedback.episode_id.in_(ended.episodes)),
        select(Feedback.seq).where(Feedback.seq.in_(seqs)),
    )
    rows = select(Feedback).where(Feedback.project_id == project_id, Feedback.seq.in_(union_all(*queries)))
    return list(await session.scalars(rows.order_by(Feedback.seq).with_for_update()))


async def delete_rewards(
    session: AsyncSession, names: SubjectNames, own: Collection[str], others: Collection[str]
) -> int:
    """Delete the rewards of the subject's `own` turns and the subject's on `others`' turns; return how many."""
    theirs = Reward.turn_id.in_(others) & Reward.rater.in_(names.raters)
    return await _execute(session, delete(Reward).where(or_(Reward.turn_id.in_(own), theirs)))


async def delete_feedback(
    session: AsyncSession, project_id: str, feedback: Sequence[Feedback], others: Collection[str]
) -> None:
    """Delete whole rows, with their idempotency keys.

    A withdrawal without content is added to each of the `others`' turns, so that they are processed again.
    """
    seqs = [row.seq for row in feedback]
    await reopen_votes(session, Feedback.seq.in_(seqs))
    await session.execute(delete(FeedbackRank).where(FeedbackRank.feedback_seq.in_(seqs)))
    await session.execute(delete_keys(row.id for row in feedback))
    await session.execute(delete(Feedback).where(Feedback.seq.in_(seqs)))
    for row in feedback:
        session.expunge(row)  # SQLite may reuse the last sequence numbers
    withdrawals = [
        {
            "id": new_id("fb"),
            "project_id": project_id,
            "turn_id": turn_id,
            "target": turn_id,
            "kind": WITHDRAWAL,
            "name": "erased",
            "source_kind": SourceKind.CODE,
            "request_metadata": {"withdraws": None},
            "idempotency_key": new_id("auto"),
            "fingerprint": "",
        }
        for turn_id in sorted(others)
    ]
    if withdrawals:  # one statement: through the session, SQLite would have one for each row
        await session.execute(insert(Feedback), withdrawals)


async def empty_judgements(session: AsyncSession, own: Collection[str], parents: Collection[str]) -> None:
    """Clear the content of judgements: their details may quote the turn, or the turn that continues it.

    The `parents` keep their values; the subject's `own` turns do not.
    """
    await session.execute(
        update(Judgement)
        .where(Judgement.turn_id.in_([*own, *parents]))
        .values(
            details={},
            reason=None,
            value=case((Judgement.turn_id.in_(parents), Judgement.value)),
            state=case((Judgement.state == JudgementState.OPEN, JudgementState.SKIPPED), else_=Judgement.state),
            fence=Judgement.fence + 1,
            lease_owner=None,
            lease_until=None,
        ),
    )


async def erase_turns(session: AsyncSession, project_id: str, turns: Sequence[Turn], ended: EndedWholes) -> None:
    """Empty the turns as the deletion of a completion does, and their conversation ids and sampling parameters too.

    What the caller wrote about their episodes is erased with them; of the `ended` ones the outcome, too.
    """
    if turns:
        await chats.erase(session, turns)
    conversation_ids = {turn.conversation_id for turn in turns} - {None}
    matches = or_(Turn.id.in_([turn.id for turn in turns]), Turn.conversation_id.in_(conversation_ids))
    await session.execute(
        update(Turn)
        .where(Turn.project_id == project_id, matches, Turn.deleted_at.is_not(None))
        .values(conversation_id=None, sampling={}, prefix_reuse=None),
    )
    episode_ids = {turn.episode_id for turn in turns if turn.episode_id is not None}
    if episode_ids:
        is_ended = Episode.id.in_(ended.episodes)
        await episode_content.erase(session, project_id, is_ended, with_outcome=True)
        others = (Episode.id.in_(episode_ids), ~is_ended)
        await episode_content.erase(session, project_id, *others, with_outcome=False)


async def delete_raters(
    session: AsyncSession, names: SubjectNames, turns: Sequence[Turn], ended: Collection[str]
) -> None:
    """Delete the subject's raters, and the nameless ones of these turns and of the `ended` conversations."""
    nameless = [rater_names.conversation_rater(id) for id in ended]
    nameless += [rater_names.single_turn_rater(turn.id) for turn in turns]
    matches = Rater.name.in_([*names.raters, *nameless])
    await session.execute(delete(Rater).where(Rater.project_id == names.project_id, matches))


async def delete_pins(session: AsyncSession, names: SubjectNames, ended: Collection[str]) -> int:
    """Delete the pins of the subject and of the `ended` conversations; return how many.

    The reasons in their audit entries are cleared, also those of earlier pins, because a reason may name the subject.
    """
    subjects = [(PinKind.USER, name) for name in names.end_users] + [(PinKind.CONVERSATION, id) for id in ended]
    hashes = [subject_hash(names.project_id, kind, subject) for kind, subject in subjects]
    of_subjects = Audit.details["subject_sha256"].as_string().in_(hashes)
    for entry in await _lock_entries(session, names, Audit.action == AuditAction.PIN_SET, of_subjects):
        entry.erase(entry.subject)
    matches = tuple_(Pin.kind, Pin.subject).in_(subjects)
    return await _execute(session, delete(Pin).where(Pin.project_id == names.project_id, matches))


async def delete_mentions(session: AsyncSession, names: SubjectNames, others: Collection[str]) -> None:
    """Remove the subject's name from the samples of `others`' turns and from the audit log."""
    by_subject = Sample.turn_id.in_(others) & Sample.rater.in_(names.raters)
    await session.execute(update(Sample).where(by_subject).values(rater=None, origin=None))
    of_raters = Audit.subject.in_([name[:128] for name in names.raters])
    is_named = Audit.details["rater"].as_string().in_(names.raters)  # the subject of an entry may be cut off
    for entry in await _lock_entries(session, names, Audit.action.in_(RATER_ACTIONS), of_raters, is_named):
        entry.erase(names.sha256)


async def _lock_entries(session: AsyncSession, names: SubjectNames, *conditions: ColumnElement[bool]) -> list[Audit]:
    """Lock and return the project's audit entries that meet the conditions, so that none is sealed meanwhile."""
    entries = select(Audit).where(Audit.project_id == names.project_id, *conditions).order_by(Audit.seq)
    return list(await session.scalars(entries.with_for_update().execution_options(populate_existing=True)))
