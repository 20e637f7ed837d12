"""Turns that are erased → reward models that learned from them: broken off, silenced, marked, and fitted anew."""

from collections.abc import Collection, Mapping

from sqlalchemy import delete, select
from sqlalchemy.ext.asyncio import AsyncSession

from app.core.database import now
from app.core.jobs import enqueue_after_commit
from app.core.settings import Settings
from app.models import Policy, RewardModel, RewardModelState, RewardModelTurn
from app.training.policy_rewards import rewards_of
from app.training.reward_models import repository, service

ERASED = "some of what it learned from is erased"


async def forget(session: AsyncSession, said: Mapping[str, float], settings: Settings) -> list[str]:
    """`said`: turns, and since when what is erased was said of them. The caller holds the locks of the policies.

    A fit that is under way loses its lease, and reads again what is left. One that served is silent from now on, and
    another is fitted. Returns the labels of those that have learned from it.
    """
    marked: list[str] = []
    rows = await repository.learned_from(session, said)
    for row in rows:
        policy = await session.get_one(Policy, row.policy_id)
        if row.state == RewardModelState.OPEN:
            await _begin_again(session, row)
        elif row.path is not None and await _learned(session, row, said):
            marked.append(service.label(policy, row))
            await _mark(session, policy, row, settings)
    return marked


async def interrupt(session: AsyncSession, turn_ids: Collection[str]) -> None:
    """Fits under way that read what was said of these turns lose their lease, and read again what is left."""
    for row in await repository.learned_from(session, turn_ids):
        if row.state == RewardModelState.OPEN:
            await _begin_again(session, row)


async def _learned(session: AsyncSession, row: RewardModel, said: Mapping[str, float]) -> bool:
    turns = await session.scalars(
        select(RewardModelTurn.turn_id).where(
            RewardModelTurn.reward_model_id == row.id, RewardModelTurn.turn_id.in_(said)
        )
    )
    return row.data_read_at is not None and any(said[turn_id] <= row.data_read_at for turn_id in turns)


async def _begin_again(session: AsyncSession, row: RewardModel) -> None:
    row.fence += 1  # a trainer that holds it must not commit
    row.attempt = max(0, row.attempt - 1)
    row.lease_owner = row.lease_until = None
    await session.execute(delete(RewardModelTurn).where(RewardModelTurn.reward_model_id == row.id))
    enqueue_after_commit(session, "train")


async def _mark(session: AsyncSession, policy: Policy, row: RewardModel, settings: Settings) -> None:
    served = row.state == RewardModelState.SERVING
    if row.tainted_at is None:
        row.tainted_at = now()
    if not served:
        return
    await service.disable(session, policy, row, actor=service.ERASURE, reason=ERASED)
    open_one = await repository.in_state(session, policy.id, RewardModelState.OPEN)
    if open_one is None and rewards_of(policy, settings).learned is not None:
        await service.open_fit(session, policy, actor=service.ERASURE, reason=f"{service.label(policy, row)}: {ERASED}")
