"""Queries on reward models."""

from collections.abc import Collection, Mapping, Sequence

from sqlalchemy import func, or_, select
from sqlalchemy.ext.asyncio import AsyncSession

from app.models import (
    NUMERIC_KINDS,
    RANKING_KINDS,
    Feedback,
    FeedbackRank,
    Policy,
    RewardModel,
    RewardModelState,
    RewardModelTurn,
    SourceKind,
    Turn,
)


def reward_model_name(policy: Policy, row: RewardModel) -> str:
    """Example: "assistant/rm-3"."""
    return format_name(policy.name, row.number)


def format_name(policy: str, number: int) -> str:
    """Example: ("assistant", 3) -> "assistant/rm-3"."""
    return f"{policy}/rm-{number}"


async def list_reward_models(session: AsyncSession, policy_id: str) -> list[RewardModel]:
    """Return the policy's reward models, the newest first."""
    query = select(RewardModel).where(RewardModel.policy_id == policy_id).order_by(RewardModel.number.desc())
    return list(await session.scalars(query))


async def find_reward_model(session: AsyncSession, policy_id: str, number: int) -> RewardModel | None:
    return await session.scalar(
        select(RewardModel).where(RewardModel.policy_id == policy_id, RewardModel.number == number)
    )


async def find_in_state(session: AsyncSession, policy_id: str, state: RewardModelState) -> RewardModel | None:
    """Return the newest reward model in this state."""
    query = select(RewardModel).where(RewardModel.policy_id == policy_id, RewardModel.state == state)
    return await session.scalar(query.order_by(RewardModel.number.desc()).limit(1))


async def find_newest(session: AsyncSession, policy_id: str) -> RewardModel | None:
    query = select(RewardModel).where(RewardModel.policy_id == policy_id)
    return await session.scalar(query.order_by(RewardModel.number.desc()).limit(1))


async def last_feedback_seq(session: AsyncSession, project_id: str) -> int:
    return int(await session.scalar(select(func.max(Feedback.seq)).where(Feedback.project_id == project_id)) or 0)


async def count_feedback_since(
    session: AsyncSession,
    policy: Policy,
    seq: int,
    limit: int,
    kinds: Sequence[str] = (*NUMERIC_KINDS, *RANKING_KINDS),
) -> int:
    """Return how much processed feedback people gave on this policy's replies after `seq`, counted up to `limit`."""
    turns = select(Turn.id).where(Turn.policy_id == policy.id)
    rankings = (
        select(FeedbackRank.feedback_seq).join(Turn, Turn.id == FeedbackRank.turn_id).where(Turn.policy_id == policy.id)
    )
    query = (
        select(Feedback.seq)
        .where(
            Feedback.project_id == policy.project_id,
            Feedback.seq > seq,
            Feedback.source_kind == SourceKind.HUMAN,
            Feedback.kind.in_(kinds),
            Feedback.processed,
            or_(
                turns.where(Turn.id == Feedback.turn_id).exists(),
                rankings.where(FeedbackRank.feedback_seq == Feedback.seq).exists(),
            ),
        )
        .limit(limit)
    )
    return int(await session.scalar(select(func.count()).select_from(query.subquery())) or 0)


async def lock_fitted_on(session: AsyncSession, turn_ids: Collection[str]) -> list[RewardModel]:
    """Lock and return the reward models that read feedback on one of these turns."""
    fitted = select(RewardModelTurn.reward_model_id).where(RewardModelTurn.turn_id.in_(turn_ids))
    query = select(RewardModel).where(RewardModel.id.in_(fitted)).order_by(RewardModel.policy_id, RewardModel.number)
    return list(await session.scalars(query.with_for_update()))


async def names_fitted_on(session: AsyncSession, turns: Mapping[str, float]) -> list[str]:
    """Return the names of the reward models that were fitted on feedback on these turns.

    Args:
        turns: For each turn id, when the feedback on it was given. A model that read its data before is left out.
    """
    rows = await session.execute(
        select(Policy.name, RewardModel.number, RewardModel.data_read_at, RewardModelTurn.turn_id)
        .join(RewardModel, RewardModel.policy_id == Policy.id)
        .join(RewardModelTurn, RewardModelTurn.reward_model_id == RewardModel.id)
        .where(RewardModelTurn.turn_id.in_(turns), RewardModel.path.is_not(None))
    )
    fitted = {
        (policy, number) for policy, number, data_read_at, turn_id in rows if turns[turn_id] <= (data_read_at or 0.0)
    }
    return [format_name(policy, number) for policy, number in sorted(fitted)]


async def summarize(session: AsyncSession, policies: Sequence[Policy]) -> list[dict[str, str | None]]:
    """Return, for each policy with a reward model, the one that serves and the newest one with its state."""
    rows: list[dict[str, str | None]] = []
    for policy in policies:
        newest = await find_newest(session, policy.id)
        if newest is not None:
            serving = await find_in_state(session, policy.id, RewardModelState.SERVING)
            rows.append(
                {
                    "serving": reward_model_name(policy, serving) if serving else None,
                    "newest": reward_model_name(policy, newest),
                    "state": newest.state,
                    "reason": newest.reason,
                }
            )
    return rows
