"""People's labels of replies: what a reward model is fitted on, and how well the serving one agrees with new ones."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

from sqlalchemy import Select, and_, func, not_, or_, select
from sqlalchemy.ext.asyncio import AsyncSession

from alignment.config.rewards import LEARNED
from alignment.signals.agreement import Agreement
from alignment.signals.combine_rewards import preference_pairs
from alignment.signals.ranking_accuracy import RankEvidence, rank_pairs, rank_votes
from app.core.rows import AnySelect
from app.models import (
    NUMERIC_KINDS,
    RANKING_KINDS,
    ApiKey,
    Feedback,
    FeedbackRank,
    Judgement,
    JudgementState,
    Policy,
    Project,
    Rater,
    RaterStanding,
    Reward,
    RewardModel,
    SourceKind,
    Turn,
)
from app.training.automated_samples import is_from_person
from app.training.sample_conditions import is_consenting

PREFERENCE_KINDS = (*NUMERIC_KINDS, *RANKING_KINDS)
RANKING_PREFIXES = tuple(f"{kind}/" for kind in RANKING_KINDS)
WHOLE_PREFIXES = ("conversation/", "episode/")  # feedback on the whole of them is about no particular reply
MAX_FEEDBACK = 300  # the latest feedback that the agreement is measured on
CHANCE = 0.5  # of the probability that a liked reply has a higher score than a disliked one
MIN_LABELS = 30  # with fewer labels nothing is concluded


class HumanLabel(NamedTuple):
    """A person's label of a turn. The labels that come from one ranking of several turns have the same `source`."""

    turn_id: str
    source: str
    value: float
    weight: float
    rater: str

    @property
    def is_ranking(self) -> bool:
        return self.source.startswith(RANKING_PREFIXES)


def select_labels(policy: Policy) -> AnySelect:
    """Return a query for the labels of turns that may be learned from, the newest first.

    Labels by quarantined or blocked raters are left out.
    """
    rater = and_(Rater.project_id == Turn.project_id, Rater.name == Reward.rater)
    excluded = Rater.standing.in_((RaterStanding.QUARANTINED, RaterStanding.BLOCKED))
    columns: tuple[Any, ...] = (Reward.turn_id, Reward.source, Reward.value, Reward.weight, Reward.rater)
    query: AnySelect = (
        select(*columns)
        .join(Turn, Turn.id == Reward.turn_id)
        .join(Project, Project.id == Turn.project_id)
        .outerjoin(ApiKey, ApiKey.id == Turn.key_id)
        .outerjoin(Rater, rater)
        .where(
            Turn.project_id == policy.project_id,
            Turn.policy_id == policy.id,
            Turn.exclusion_reason.is_(None),
            Turn.deleted_at.is_(None),
            is_consenting(),
            is_from_person(),
            *(not_(Reward.source.startswith(prefix)) for prefix in WHOLE_PREFIXES),
            Reward.weight > 0,
            or_(Rater.standing.is_(None), not_(excluded)),
        )
        .order_by(Reward.created_at.desc(), Reward.id)
    )
    return query


class MeasuredModel(NamedTuple):
    """How a serving reward model's scores compare with people's feedback that came later."""

    agreement: Agreement = Agreement()
    evidence: RankEvidence = RankEvidence()


async def measure_agreement(session: AsyncSession, policy: Policy, row: RewardModel) -> MeasuredModel:
    """Compare the reward model with people's feedback on replies that it had scored, given after it began to serve."""
    turn_ids = await _recently_rated_turn_ids(session, policy, row)
    judgements = await session.execute(
        select(Judgement.turn_id, Judgement.value).where(
            Judgement.turn_id.in_(turn_ids),
            Judgement.source == LEARNED,
            Judgement.state == JudgementState.DONE,
            Judgement.details["reward_model"].as_string() == row.id,
        )
    )
    scores = {turn_id: value for turn_id, value in judgements if value is not None}
    if not scores:
        return MeasuredModel()
    since = func.coalesce(row.served_at, 0.0)
    labels = select_labels(policy).where(Reward.turn_id.in_(scores), Reward.created_at > since)
    return compare_labels([HumanLabel(*row) for row in await session.execute(labels)], scores)


async def last_feedback_seq(session: AsyncSession, project_id: str) -> int:
    return int(await session.scalar(select(func.max(Feedback.seq)).where(Feedback.project_id == project_id)) or 0)


async def count_feedback_since(
    session: AsyncSession, policy: Policy, seq: int, limit: int, kinds: Sequence[str] = PREFERENCE_KINDS
) -> int:
    """Return how much processed feedback people gave on this policy's replies after `seq`, counted up to `limit`."""
    query = _select_feedback(policy, seq, kinds).where(Feedback.processed).limit(limit)
    return int(await session.scalar(select(func.count()).select_from(query.subquery())) or 0)


async def _recently_rated_turn_ids(session: AsyncSession, policy: Policy, row: RewardModel) -> set[str]:
    """Return the turns of the latest feedback that people gave after the reward model's data was read."""
    query = _select_feedback(policy, row.last_feedback_seq, PREFERENCE_KINDS).order_by(Feedback.seq.desc())
    latest = [(seq, turn_id) for seq, turn_id in await session.execute(query.limit(MAX_FEEDBACK))]
    rankings = [seq for seq, turn_id in latest if turn_id is None]
    ranked = select(FeedbackRank.turn_id).where(FeedbackRank.feedback_seq.in_(rankings))
    return {turn_id for _, turn_id in latest if turn_id is not None} | set(await session.scalars(ranked))


def _select_feedback(policy: Policy, seq: int, kinds: Sequence[str]) -> Select[int, str | None]:
    """Return a query for the numbers and the turns of people's feedback on the policy's replies after `seq`."""
    turns = select(Turn.id).where(Turn.policy_id == policy.id)
    ranked_turns = turns.join(FeedbackRank, FeedbackRank.turn_id == Turn.id)
    return select(Feedback.seq, Feedback.turn_id).where(
        Feedback.project_id == policy.project_id,
        Feedback.seq > seq,
        Feedback.source_kind == SourceKind.HUMAN,
        Feedback.kind.in_(kinds),
        or_(
            turns.where(Turn.id == Feedback.turn_id).exists(),
            ranked_turns.where(FeedbackRank.feedback_seq == Feedback.seq).exists(),
        ),
    )


def compare_labels(labels: list[HumanLabel], scores: dict[str, float]) -> MeasuredModel:
    """Compare `scores` (by turn id) with the labels and with the pairs of each ranking."""
    single = [(label.value, scores[label.turn_id]) for label in labels if not label.is_ranking]
    rankings: dict[str, dict[str, float]] = defaultdict(dict)
    for label in labels:
        if label.is_ranking:
            rankings[label.source][label.turn_id] = label.value
    pairs = [pair for values in rankings.values() for pair in preference_pairs(values)]
    margins = [scores[chosen] - scores[rejected] for chosen, rejected in pairs]
    evidence = RankEvidence((*rank_votes(single), *rank_pairs(margins)))
    return MeasuredModel(Agreement.count(single, margins), evidence)


def describe_disagreement(measured: MeasuredModel) -> str | None:
    """Return why the reward model must be disabled: people's feedback does not show that it is better than chance.

    None with too few labels.
    """
    agreement, evidence = measured
    low = evidence.bounds().low
    if evidence.num_votes < MIN_LABELS or low > CHANCE:
        return None
    return (
        f"it agrees with people in {agreement.rate:.0%} of their last {agreement.total} labels, and orders replies as "
        f"they do with a probability of {evidence.auc:.0%}, which may be as low as {low:.0%}: no better than chance"
    )
