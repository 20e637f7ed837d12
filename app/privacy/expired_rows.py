"""The rows that a project no longer keeps, as conditions and queries. What is in use does not expire."""

from sqlalchemy import ColumnElement, Select, and_, exists, func, literal, or_, select
from sqlalchemy.orm import InstrumentedAttribute, aliased
from sqlalchemy.orm.util import AliasedClass

from app.core.database import now
from app.models import (
    Audit,
    Base,
    Batch,
    BatchState,
    Dataset,
    Feedback,
    FeedbackRank,
    Judgement,
    JudgementState,
    PlanState,
    RewardModel,
    RewardModelState,
    RewardModelTurn,
    RolloutPlan,
    Sample,
    SampleState,
    Turn,
    TurnState,
)

SECONDS_PER_DAY = 86_400.0
WAITING = (SampleState.OPEN, SampleState.QUARANTINED, SampleState.BATCHED)


def created_before(column: InstrumentedAttribute[float], days: float) -> ColumnElement[bool]:
    return column < now() - days * SECONDS_PER_DAY


def has_row(table: type[Base] | AliasedClass[Base], *conditions: ColumnElement[bool]) -> ColumnElement[bool]:
    """Return the condition that a row exists, as a subquery that is evaluated for each row of the query around it.

    OFFSET 0 keeps PostgreSQL from joining whole tables instead: few rows are asked about, each by an index.
    """
    return select(literal(1)).select_from(table).where(*conditions).offset(0).exists()


def _is_in_use(turn: type[Turn]) -> ColumnElement[bool]:
    """Return the condition that something waits for this turn.

    It or feedback on it is not processed, its sample waits or is in an open batch, a judgement is open, or a reward
    model is being fitted on it.
    """
    is_of_episode = and_(Feedback.project_id == turn.project_id, Feedback.episode_id == turn.episode_id)
    is_of_conversation = and_(Feedback.project_id == turn.project_id, Feedback.conversation_id == turn.conversation_id)
    return or_(
        turn.state == TurnState.OPEN,
        ~turn.processed,
        has_row(Sample, Sample.turn_id == turn.id, Sample.state.in_(WAITING)),
        has_row(Judgement, Judgement.turn_id == turn.id, Judgement.state == JudgementState.OPEN),
        has_row(Feedback, Feedback.turn_id == turn.id, ~Feedback.processed),
        has_row(Feedback, is_of_conversation, ~Feedback.processed),
        has_row(Feedback, is_of_episode, ~Feedback.processed),
        has_row(
            FeedbackRank,
            FeedbackRank.turn_id == turn.id,
            has_row(Feedback, Feedback.seq == FeedbackRank.feedback_seq, ~Feedback.processed),
        ),
        has_row(
            RewardModelTurn,
            RewardModelTurn.turn_id == turn.id,
            has_row(
                RewardModel,
                RewardModel.id == RewardModelTurn.reward_model_id,
                RewardModel.state == RewardModelState.OPEN,
            ),
        ),
    )


def is_unused() -> ColumnElement[bool]:
    """Return the condition that nothing waits for the turn, for another reply to its prompt, or for a shadow reply."""
    reply, shadow = aliased(Turn), aliased(Turn)
    is_other = and_(reply.completion_id == Turn.completion_id, reply.id != Turn.id)
    return and_(
        ~_is_in_use(Turn),
        ~has_row(reply, is_other, _is_in_use(reply)),
        ~has_row(shadow, shadow.shadow_of_id == Turn.id, _is_in_use(shadow)),
    )


def is_expired_turn(turn: type[Turn], project_id: str, days: float) -> ColumnElement[bool]:
    return and_(turn.project_id == project_id, turn.deleted_at.is_(None), created_before(turn.created_at, days))


def select_ends(project_id: str, days: float) -> Select[str]:
    """Return a query for the ids of the expired turns that no turn with content quotes, the oldest first.

    Each of them can be removed, so a step always makes progress, however many turns are in use.
    """
    later = aliased(Turn)
    is_quoted = has_row(later, later.history_id == Turn.id, later.deleted_at.is_(None))
    conditions = (is_expired_turn(Turn, project_id, days), ~is_quoted, is_unused())
    return select(Turn.id).where(*conditions).order_by(Turn.created_at, Turn.id)


def select_turns(project_id: str, days: float) -> Select[str]:
    """Return a query for the ids of all turns that can be removed. It reads every expired turn: too slow for a step."""
    later, history = aliased(Turn), aliased(Turn)
    is_expired = is_expired_turn(Turn, project_id, days)
    is_quoted = has_row(
        later, later.history_id == Turn.id, later.deleted_at.is_(None), ~created_before(later.created_at, days)
    )
    needed = select(Turn.id, Turn.history_id).where(is_expired, or_(is_quoted, ~is_unused()))
    remaining = needed.cte("remaining", recursive=True)
    histories = select(history.id, history.history_id).join(remaining, history.id == remaining.c.history_id)
    remaining = remaining.union(histories)
    return select(Turn.id).where(is_expired, ~exists().where(remaining.c.id == Turn.id))


def select_feedback(project_id: str, days: float) -> Select[int]:
    """Return a query for the numbers of the expired feedback, the oldest first.

    Feedback on a turn, a conversation or an episode that is kept, or that an open batch learns from, is kept.
    """
    turn, ranked, of_conversation, of_episode = aliased(Turn), aliased(Turn), aliased(Turn), aliased(Turn)
    uses = (
        has_row(turn, turn.id == Feedback.turn_id, turn.deleted_at.is_(None)),
        has_row(
            FeedbackRank,
            FeedbackRank.feedback_seq == Feedback.seq,
            has_row(ranked, ranked.id == FeedbackRank.turn_id, ranked.deleted_at.is_(None)),
        ),
        has_row(
            of_conversation,
            of_conversation.project_id == Feedback.project_id,
            of_conversation.conversation_id == Feedback.conversation_id,
            of_conversation.deleted_at.is_(None),
        ),
        has_row(of_episode, of_episode.episode_id == Feedback.episode_id, of_episode.deleted_at.is_(None)),
        has_row(Batch, Batch.id == Feedback.batch_id, Batch.state == BatchState.OPEN),
    )
    conditions = (Feedback.project_id == project_id, Feedback.emptied_at.is_(None), Feedback.processed)
    query = select(Feedback.seq).where(*conditions, created_before(Feedback.created_at, days))
    return query.where(*(~use for use in uses)).order_by(Feedback.created_at, Feedback.seq)


def select_datasets(project_id: str, days: float) -> Select[str]:
    """Return a query for the ids of the expired datasets that no rollout plan still reads."""
    is_read = exists().where(
        RolloutPlan.dataset_id == Dataset.id, RolloutPlan.state.in_((PlanState.RUNNING, PlanState.PAUSED))
    )
    is_visible = (Dataset.project_id == project_id, Dataset.importing_until.is_(None))
    conditions = (*is_visible, created_before(Dataset.created_at, days))
    return select(Dataset.id).where(*conditions, ~is_read).order_by(Dataset.created_at, Dataset.id)


def select_audit(project_id: str, days: float) -> Select[int | None]:
    """Return a query for the places in the chain of the expired entries: a part from its beginning on, without gaps."""
    remaining = aliased(Audit)
    first_remaining = select(func.min(remaining.chain_number)).where(
        remaining.project_id == project_id,
        remaining.chain_number.is_not(None),
        ~created_before(remaining.created_at, days),
    )
    is_before = or_(first_remaining.scalar_subquery().is_(None), Audit.chain_number < first_remaining.scalar_subquery())
    conditions = (Audit.project_id == project_id, Audit.chain_number.is_not(None))
    return (
        select(Audit.chain_number)
        .where(*conditions, created_before(Audit.created_at, days), is_before)
        .order_by(Audit.chain_number)
    )
