"""Queries on reward models."""

from collections.abc import Collection, Mapping, Sequence

from sqlalchemy import func, or_, select
from sqlalchemy.ext.asyncio import AsyncSession

from app.feedback.kinds import NUMBERS, ORDERS
from app.models import Feedback, FeedbackRank, Policy, RewardModel, RewardModelState, RewardModelTurn, Turn
from app.raters.names import PERSON


async def models_of(session: AsyncSession, policy_id: str) -> list[RewardModel]:
    """The newest first."""
    rows = select(RewardModel).where(RewardModel.policy_id == policy_id).order_by(RewardModel.number.desc())
    return list(await session.scalars(rows))


async def numbered(session: AsyncSession, policy_id: str, number: int) -> RewardModel | None:
    return await session.scalar(
        select(RewardModel).where(RewardModel.policy_id == policy_id, RewardModel.number == number)
    )


async def in_state(session: AsyncSession, policy_id: str, state: RewardModelState) -> RewardModel | None:
    """The one there is; of several the newest."""
    rows = select(RewardModel).where(RewardModel.policy_id == policy_id, RewardModel.state == state)
    return await session.scalar(rows.order_by(RewardModel.number.desc()).limit(1))


async def newest(session: AsyncSession, policy_id: str) -> RewardModel | None:
    rows = select(RewardModel).where(RewardModel.policy_id == policy_id)
    return await session.scalar(rows.order_by(RewardModel.number.desc()).limit(1))


async def last_feedback(session: AsyncSession, project_id: str) -> int:
    return int(await session.scalar(select(func.max(Feedback.seq)).where(Feedback.project_id == project_id)) or 0)


async def heard_since(
    session: AsyncSession, policy: Policy, seq: int, most: int, kinds: Sequence[str] = (*NUMBERS, *ORDERS)
) -> int:
    """How often people have spoken of this policy's replies since, counted up to `most`."""
    mine = Turn.policy_id == policy.id
    ranked = select(FeedbackRank.feedback_seq).join(Turn, Turn.id == FeedbackRank.turn_id).where(mine)
    alone = select(Turn.id).where(mine)
    heard = (
        select(Feedback.seq)
        .where(
            Feedback.project_id == policy.project_id,
            Feedback.seq > seq,
            Feedback.source_kind == PERSON,
            Feedback.kind.in_(kinds),
            Feedback.processed,
            or_(
                alone.where(Turn.id == Feedback.turn_id).exists(),
                ranked.where(FeedbackRank.feedback_seq == Feedback.seq).exists(),
            ),
        )
        .limit(most)
    )
    return int(await session.scalar(select(func.count()).select_from(heard.subquery())) or 0)


async def learned_from(session: AsyncSession, turn_ids: Collection[str]) -> list[RewardModel]:
    """The reward models that what people said of these turns went into."""
    taught = select(RewardModelTurn.reward_model_id).where(RewardModelTurn.turn_id.in_(turn_ids))
    rows = select(RewardModel).where(RewardModel.id.in_(taught)).order_by(RewardModel.policy_id, RewardModel.number)
    return list(await session.scalars(rows.with_for_update()))


async def taught(session: AsyncSession, said: Mapping[str, float]) -> list[str]:
    """The reward models that learned from these turns, read no sooner than what was said of them then; by name."""
    rows = await session.execute(
        select(Policy.name, RewardModel.number, RewardModel.data_read_at, RewardModelTurn.turn_id)
        .join(RewardModel, RewardModel.policy_id == Policy.id)
        .join(RewardModelTurn, RewardModelTurn.reward_model_id == RewardModel.id)
        .where(RewardModelTurn.turn_id.in_(said), RewardModel.path.is_not(None))
    )
    found = {
        (policy, number) for policy, number, data_read_at, turn_id in rows if said[turn_id] <= (data_read_at or 0.0)
    }
    return [f"{policy}/rm-{number}" for policy, number in sorted(found)]


async def summary(session: AsyncSession, policies: Sequence[Policy]) -> list[dict[str, str | None]]:
    """Of each policy that has any: the one that serves, and how the newest stands."""
    told: list[dict[str, str | None]] = []
    for policy in policies:
        last = await newest(session, policy.id)
        if last is not None:
            serving = await in_state(session, policy.id, RewardModelState.SERVING)
            name = f"{policy.name}/rm-{serving.number}" if serving else None
            newest_one = f"{policy.name}/rm-{last.number}"
            told.append({"serving": name, "newest": newest_one, "state": last.state, "reason": last.reason})
    return told
