"""Does the reward model that serves agree with what people have said since? Counted over their latest words."""

from collections import defaultdict

from sqlalchemy import func, or_, select
from sqlalchemy.ext.asyncio import AsyncSession

from alignment.config.rewards import LEARNED, preferred
from alignment.signals.agreement import Agreement
from app.feedback.kinds import NUMBERS, ORDERS
from app.models import Feedback, FeedbackRank, Judgement, JudgementState, Policy, Reward, RewardModel, Turn
from app.raters.names import PERSON
from app.training.reward_models import human_labels
from app.training.reward_models.human_labels import Word

LATEST = 300  # feedback of people that is looked at
FEWEST = 30  # words below which nothing is concluded


async def measured(session: AsyncSession, policy: Policy, row: RewardModel) -> Agreement:
    """Of what people said after it began to serve, about replies that it had judged itself."""
    mine = select(Turn.id).where(Turn.policy_id == policy.id)
    ordered = (
        select(FeedbackRank.feedback_seq).join(Turn, Turn.id == FeedbackRank.turn_id).where(Turn.policy_id == policy.id)
    )
    recent = (
        select(Feedback.seq, Feedback.turn_id)
        .where(
            Feedback.project_id == policy.project_id,
            Feedback.seq > row.last_feedback_seq,
            Feedback.source_kind == PERSON,
            Feedback.kind.in_((*NUMBERS, *ORDERS)),
            or_(
                mine.where(Turn.id == Feedback.turn_id).exists(),
                ordered.where(FeedbackRank.feedback_seq == Feedback.seq).exists(),
            ),
        )
        .order_by(Feedback.seq.desc())
        .limit(LATEST)
    )
    latest = [tuple(one) for one in await session.execute(recent)]
    ranked = select(FeedbackRank.turn_id).where(
        FeedbackRank.feedback_seq.in_([seq for seq, turn_id in latest if turn_id is None])
    )
    turn_ids = {turn_id for _, turn_id in latest if turn_id is not None} | set(await session.scalars(ranked))
    judged = await session.execute(
        select(Judgement.turn_id, Judgement.value).where(
            Judgement.turn_id.in_(turn_ids),
            Judgement.source == LEARNED,
            Judgement.state == JudgementState.DONE,
            Judgement.details["reward_model"].as_string() == row.id,
        )
    )
    told = {turn_id: value for turn_id, value in judged if value is not None}
    if not told:
        return Agreement()
    since = func.coalesce(row.served_at, 0.0)
    said = human_labels.words(policy).where(Reward.turn_id.in_(told), Reward.created_at > since)
    return agreement(human_labels.read((await session.execute(said)).all()), told)


def agreement(words: list[Word], told: dict[str, float]) -> Agreement:
    thumbs = [(word.value, told[word.turn_id]) for word in words if not word.orders]
    rankings: dict[str, dict[str, float]] = defaultdict(dict)
    for word in words:
        if word.orders:
            rankings[word.source][word.turn_id] = word.value
    pairs = [pair for values in rankings.values() for pair in preferred(values)]
    return Agreement.of(thumbs, [told[better] - told[worse] for better, worse in pairs])


def contrary(counted: Agreement, least: float) -> str | None:
    """Why it must be silent; None where too little is known, or it may be chance."""
    if counted.words < FEWEST or counted.at_most is None or counted.at_most >= least:
        return None
    return (
        f"it agrees with people in {counted.share:.0%} of their last {counted.words} words "
        f"(at most {counted.at_most:.0%}, and {least:.0%} is asked for)"
    )
