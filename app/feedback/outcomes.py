"""What becomes of feedback: learned from (by which version), waiting (for what) or not learned from (by which rule).

`select_outcomes` is the only definition. It has one row for each piece of feedback, so that the counts of all outcomes
add up to the number of votes.
"""

from collections.abc import Collection, Iterable, Sequence
from typing import Any, NamedTuple

from sqlalchemy import (
    ColumnElement,
    FromClause,
    Subquery,
    and_,
    bindparam,
    case,
    exists,
    func,
    or_,
    select,
    union_all,
)
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import join

from alignment.corrected_text import TextRule
from app.core.database import now
from app.core.rows import AnyRow, AnySelect
from app.feedback.effective import is_replaced, is_withdrawn
from app.feedback.feedback_rows import OutcomeBody
from app.feedback.outcome_reasons import CODES, REASONS, TEXT_SENTENCES, Reason, state_of, write_sentence
from app.feedback.schemas import WITHDRAWAL
from app.models import (
    PENDING_RELEASE,
    VOTE_KINDS,
    Batch,
    BatchState,
    Episode,
    EpisodeState,
    Feedback,
    FeedbackRank,
    LearningMode,
    LineMove,
    Origin,
    Policy,
    PolicyState,
    Reward,
    Sample,
    SampleRule,
    SampleState,
    Turn,
    TurnState,
    Version,
    VersionState,
)
from app.policies.references import format_reference
from app.training.automated_samples import is_from_person, is_in_automated_batch
from app.training.episode_groups import PREFIX
from app.training.sample_conditions import has_consent, waits_for_new

Conditions = Sequence[tuple[ColumnElement[bool], Reason]]
DECIDING_STATES = (BatchState.OPEN, BatchState.TRAINED)  # feedback in a batch of another state is as if it were in none
_IS_TRAINED = Batch.state == BatchState.TRAINED
# Only versions whose samples have not been given back yet have feedback in their batches.
_IS_BEING_UNDONE = exists().where(
    LineMove.policy_id == Version.policy_id, Version.number.between(LineMove.undone_from, LineMove.undone_to)
)
BATCH_CONDITIONS: Conditions = (
    (Batch.state == BatchState.OPEN, Reason.TRAINING),
    (_IS_TRAINED & _IS_BEING_UNDONE.correlate(Version), Reason.UNDONE),
    (_IS_TRAINED & (Version.state == VersionState.ROLLED_BACK), Reason.ROLLED_BACK),
    (_IS_TRAINED & (Version.state == VersionState.REJECTED), Reason.VERSION_REJECTED),
    (_IS_TRAINED & Version.state.in_(PENDING_RELEASE), Reason.RELEASE),
    (_IS_TRAINED, Reason.LEARNED),
)


class EffectiveOutcome(NamedTuple):
    """What views of feedback add when it is read: an OutcomeView as a dict, and whether it is effective."""

    effective: bool
    withdrawn: bool
    outcome: OutcomeBody


def select_outcomes(project_id: ColumnElement[str], condition: ColumnElement[bool]) -> AnySelect:
    """Return a query of the outcomes of a project's feedback for which the condition holds: one row for each.

    `code` is the index of the outcome's reason in REASONS. `policy_id` is the policy of the reply that decides the
    outcome; it is null for feedback about replies of which no row is left. `reply_policy_id` is the same for feedback
    in no batch, and a condition on it lets PostgreSQL estimate the number of rows.
    """
    chosen = (Feedback.project_id == project_id, condition)
    columns = _outcome_columns()

    def join_state(feedback_and_turns: FromClause) -> Any:
        """Return the columns for each feedback with a turn. Every row of the argument gives one row."""
        return (
            select(*columns)
            .select_from(feedback_and_turns)
            .outerjoin(Reward, and_(Reward.turn_id == Turn.id, Reward.feedback_seq == Feedback.seq))
            .outerjoin(Sample, Sample.turn_id == Turn.id)
            .outerjoin(Batch, and_(Batch.id == Feedback.batch_id, Batch.state.in_(DECIDING_STATES)))
            .outerjoin(Version, Version.id == Batch.version_id)
            .outerjoin(Policy, Policy.id == func.coalesce(Batch.policy_id, Turn.policy_id))
            .where(*chosen, Feedback.kind != WITHDRAWAL)
        )

    concerned = _turns_of_several(chosen)
    several = join(Feedback, concerned, concerned.c.seq == Feedback.seq).outerjoin(Turn, Turn.id == concerned.c.turn_id)
    # Replies that came after the feedback on their conversation decide only if they have its reward.
    is_later = case((or_(Turn.created_at <= Feedback.created_at, Reward.id.is_not(None)), 0), else_=1)
    order = (is_later, columns[0], Turn.created_at, Turn.id)
    position = func.row_number().over(partition_by=Feedback.seq, order_by=order)
    by_turn = join_state(several).add_columns(position.label("position")).subquery().c
    outcomes = union_all(
        join_state(join(Feedback, Turn, Turn.id == Feedback.turn_id)),
        select(*[by_turn[column.name] for column in columns]).where(by_turn.position == 1),
    )
    return select(outcomes.subquery("outcomes"))


def _turns_of_several(chosen: Iterable[ColumnElement[bool]]) -> Subquery:
    """Return (seq, turn id) of feedback on several turns: those of a ranking, a conversation or an episode.

    The turn id is null if there is none left.
    """
    several: Any = select(Feedback.seq).where(*chosen, Feedback.turn_id.is_(None), Feedback.kind != WITHDRAWAL)
    in_conversation = and_(
        Turn.project_id == Feedback.project_id,
        Turn.conversation_id == Feedback.conversation_id,
        Turn.origin == Origin.CHAT,
    )
    in_episode = and_(
        Turn.project_id == Feedback.project_id, Turn.episode_id == Feedback.episode_id, Turn.origin == Origin.CHAT
    )
    # No index serves this. SQLite would use that of conversations, in which all other feedback has no conversation.
    is_about_conversation = func.coalesce(Feedback.conversation_id, "") != ""
    is_about_episode = func.coalesce(Feedback.episode_id, "") != ""
    ranked = several.add_columns(FeedbackRank.turn_id).where(~is_about_conversation, ~is_about_episode)
    conversations = several.add_columns(Turn.id).where(is_about_conversation)
    episodes = several.add_columns(Turn.id).where(is_about_episode)
    return union_all(
        ranked.outerjoin_from(Feedback, FeedbackRank, FeedbackRank.feedback_seq == Feedback.seq),
        conversations.outerjoin_from(Feedback, Turn, in_conversation),
        episodes.outerjoin_from(Feedback, Turn, in_episode),
    ).subquery("concerned")


def _outcome_columns() -> list[Any]:
    """Return the columns of an outcome, for a turn that the feedback is about."""
    return [
        _outcome_code().label("code"),
        Feedback.seq,
        Feedback.kind,
        Feedback.source_kind,
        Feedback.created_at,
        (~is_replaced()).label("is_latest"),
        is_withdrawn().label("is_withdrawn"),
        func.coalesce(Batch.policy_id, Turn.policy_id).label("policy_id"),
        Policy.name.label("policy"),
        Version.number.label("version"),
        Batch.parent_id,
        Feedback.batch_id,
        Sample.ready_at,
        Sample.reason.label("sample_reason"),
        Sample.state.label("sample_state"),
        Turn.version_id.label("reply_version_id"),
        Turn.policy_id.label("reply_policy_id"),
        Turn.finished_at,
        case(
            (and_(Feedback.kind == "correction", Feedback.turn_id.is_(None)), TextRule.WHOLE_CONVERSATION),
            else_=Feedback.text_rule,
        ).label("text_rule"),
    ]


def to_code(conditions: Conditions) -> ColumnElement[int]:
    """Return the code of the first reason whose condition holds, as a SQL expression."""
    codes = [(condition, CODES[reason]) for condition, reason in conditions]
    return case(*codes, else_=CODES[Reason.UNTRAINABLE])


def _is_about_open_episode() -> ColumnElement[bool]:
    is_open = (Episode.id == Feedback.episode_id, Episode.state == EpisodeState.OPEN)
    return exists().where(*is_open).correlate(Feedback)


def _is_in_open_episode() -> ColumnElement[bool]:
    is_open = (Episode.id == Turn.episode_id, Episode.state == EpisodeState.OPEN)
    return exists().where(*is_open).correlate(Turn)


def _outcome_code() -> ColumnElement[int]:
    """Return the code of the outcome's reason.

    A batch decides before a withdrawal: what was learned stays learned. A batch that was broken up is not joined.
    """
    is_open = Sample.state == SampleState.OPEN
    conditions: Conditions = (
        *BATCH_CONDITIONS,
        (is_withdrawn(), Reason.WITHDRAWN),
        (is_replaced(), Reason.REPLACED),
        (Feedback.kind.not_in(VOTE_KINDS), Reason.NO_REWARD),
        (~Feedback.processed & _is_about_open_episode(), Reason.EPISODE_OPEN),
        (or_(Turn.id.is_(None), Turn.deleted_at.is_not(None)), Reason.ERASED),
        (~Feedback.processed & (Turn.state == TurnState.OPEN), Reason.REPLY_UNFINISHED),
        (~Feedback.processed, Reason.PROCESSING),
        (Turn.origin == Origin.SHADOW, Reason.EXCLUDED),
        (Reward.weight.is_(None) & Feedback.kind.in_(("correction", "categorical")), Reason.NO_REWARD),
        (Reward.weight.is_(None), Reason.UNPROCESSABLE),
        (Reward.weight <= 0, Reason.RATER_BLOCKED),
        (Sample.turn_id.is_(None), Reason.NO_REWARD),
        (~Sample.uses_feedback & (Sample.state != SampleState.DROPPED), Reason.NOT_USED),
        (is_open & ~has_consent(), Reason.CONSENT),
        (is_open & or_(Policy.mode == LearningMode.HALTED, Policy.state != PolicyState.ACTIVE), Reason.RESUME),
        (is_open & (Sample.ready_at > now()) & _is_in_open_episode(), Reason.EPISODE_OPEN),
        (is_open & (Sample.ready_at > now()) & Sample.group_id.startswith(PREFIX), Reason.EPISODE_GROUP),
        (is_open & (Sample.ready_at > now()), Reason.OTHER_SOURCES),
        (is_open & waits_for_new(), Reason.NEW_FEEDBACK),
        (is_open, Reason.BATCH),
        (Sample.state == SampleState.QUARANTINED, Reason.ADMIN_REVIEW),
        (
            (Sample.state == SampleState.BATCHED) & is_from_person() & is_in_automated_batch(),
            Reason.SCORE_IN_TRAINING,
        ),
        (Sample.state.in_((SampleState.BATCHED, SampleState.TRAINED)), Reason.TOO_LATE),
        *((Sample.rule == rule, Reason(rule)) for rule in SampleRule),
    )
    return to_code(conditions)


# Built once: that takes as long as the query itself.
BY_SEQ = select_outcomes(bindparam("project_id"), Feedback.seq.in_(bindparam("seqs", expanding=True)))


async def read_outcomes(session: AsyncSession, project_id: str, seqs: Collection[int]) -> dict[int, EffectiveOutcome]:
    """Return the outcomes of feedback by `seq`, in one statement."""
    if not seqs:
        return {}
    rows = await session.execute(BY_SEQ, {"project_id": project_id, "seqs": list(seqs)})
    return {
        row.seq: EffectiveOutcome(row.is_latest and not row.is_withdrawn, row.is_withdrawn, _view(row)) for row in rows
    }


def _view(row: AnyRow) -> OutcomeBody:
    """Return an OutcomeView as a dict."""
    reason = REASONS[row.code]
    state = state_of(reason)
    has_version = reason in (Reason.LEARNED, Reason.RELEASE, Reason.UNDONE, Reason.ROLLED_BACK, Reason.VERSION_REJECTED)
    version = format_reference(row.policy, row.version) if has_version and row.version is not None else None
    return {
        "state": state,
        "waiting_for": reason if state == "waiting" else None,
        "rule": reason if state == "not_learned" else None,
        "version": version,
        "batch": row.batch_id if has_version or reason == Reason.TRAINING else None,
        "until": row.ready_at if reason in (Reason.OTHER_SOURCES, Reason.EPISODE_GROUP) else None,
        "text_rule": row.text_rule,
        "sentence": write_sentence(reason, version, row.sample_reason) + TEXT_SENTENCES.get(row.text_rule, ""),
    }
