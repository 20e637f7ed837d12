"""Removes erased and withdrawn turns from learning.

Open samples are dropped, frozen batches with these turns are refused, and versions and reward models that learned from
them are marked as tainted.
"""

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence

from sqlalchemy import delete, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from app.core.database import now
from app.core.jobs import enqueue_after_commit
from app.core.settings import Settings
from app.models import (
    BatchState,
    Policy,
    Rater,
    RaterStanding,
    Reward,
    RewardModel,
    RewardModelState,
    RewardModelTurn,
    Sample,
    SampleRule,
    SampleState,
    Turn,
    Version,
    lock_turns,
)
from app.policies.locks import LockedPolicy, lock_policies
from app.policies.repository import select_descendants
from app.training import batch_samples, reward_models
from app.training.policy_config import effective_rewards

LockedPolicies = Mapping[str, LockedPolicy]  # by id
WITHDRAWN = "all feedback about its turn was withdrawn or replaced by feedback without a reward"
REASONS = {SampleRule.ERASED: batch_samples.ERASED, SampleRule.WITHDRAWN: WITHDRAWN}
SAMPLES_ERASED = "some of its samples were erased"
REWARD_MODEL_DATA_ERASED = "some of the data it learned from was erased"


async def lock_policies_and_turns(session: AsyncSession, project_id: str, turn_ids: Collection[str]) -> LockedPolicies:
    """Lock the project's policies, then the turns. Returns the policies by id.

    Assembling and committing an update lock the policy first too, so no batch is frozen or trained meanwhile.
    """
    of_project = select(Policy.id).where(Policy.project_id == project_id).order_by(Policy.id)
    policies = await lock_policies(session, list(await session.scalars(of_project)))
    await lock_turns(session, turn_ids)
    return policies


async def unlearn_turns(
    session: AsyncSession, policies: LockedPolicies, erased: Collection[str], affected: Collection[str]
) -> list[str]:
    """Drop the samples of these turns, and return the ids of the batches that were refused.

    Args:
        policies: All policies of the project.
        erased: Turns that must never be learned from again.
        affected: Turns that are processed again, because feedback that counted for them is gone.
    """
    refused = await break_up_batches(session, policies, [*erased, *affected])
    await drop_samples(session, erased, (SampleState.OPEN, SampleState.QUARANTINED), SampleRule.ERASED)
    quarantined = await _turns_of_quarantined_raters(session, affected)
    await drop_samples(
        session, set(affected) - quarantined, (SampleState.OPEN, SampleState.QUARANTINED), SampleRule.WITHDRAWN
    )
    await drop_samples(session, quarantined, (SampleState.OPEN,), SampleRule.WITHDRAWN)
    personal_columns = dict.fromkeys(("conversation_id", "rater", "cluster", "group_id"))
    await session.execute(update(Sample).where(Sample.turn_id.in_(erased)).values(personal_columns))
    enqueue_after_commit(session, "curate", "assemble")
    return refused


async def _turns_of_quarantined_raters(session: AsyncSession, turn_ids: Collection[str]) -> set[str]:
    """Return those of the turns with a reward by a quarantined rater: their samples still wait for an admin."""
    query = (
        select(Reward.turn_id)
        .join(Turn, Turn.id == Reward.turn_id)
        .join(Rater, (Rater.project_id == Turn.project_id) & (Rater.name == Reward.rater))
        .where(Reward.turn_id.in_(turn_ids), Rater.standing == RaterStanding.QUARANTINED)
    )
    return set(await session.scalars(query))


async def break_up_batches(session: AsyncSession, policies: LockedPolicies, turn_ids: Collection[str]) -> list[str]:
    """Refuse the open batches of the policies with these turns, return their samples, and return the batches' ids.

    The fencing token changes, so that a trainer that has claimed such a batch cannot commit it.
    """
    has_turn = (Sample.turn_id.in_(turn_ids), Sample.state == SampleState.BATCHED, Sample.batch_id.is_not(None))
    batches = select(Sample.policy_id, Sample.batch_id).where(*has_turn).group_by(Sample.policy_id, Sample.batch_id)
    rows = await session.execute(batches.order_by(Sample.policy_id, Sample.batch_id))
    by_policy: defaultdict[str, list[str]] = defaultdict(list)
    for policy_id, batch_id in rows:
        by_policy[policy_id].append(batch_id or "")
    refused: list[str] = []
    for policy_id, batch_ids in by_policy.items():
        refused += await batch_samples.break_up_batches(
            policies[policy_id], batch_ids, BatchState.REFUSED, SAMPLES_ERASED
        )
    return sorted(refused)


async def drop_samples(
    session: AsyncSession,
    turn_ids: Collection[str],
    states: Sequence[SampleState],
    rule: SampleRule,
    reason: str | None = None,
) -> None:
    """Drop the samples of these turns that are in one of `states`. `reason` is None for that of the rule."""
    drop = update(Sample).where(Sample.turn_id.in_(turn_ids), Sample.state.in_(states))
    await session.execute(drop.values(state=SampleState.DROPPED, rule=rule, reason=reason or REASONS[rule]))


async def mark_tainted(session: AsyncSession, version_ids: Collection[str]) -> None:
    """Mark these versions and all their descendants: they have learned from data that is erased now."""
    descendants = select_descendants(version_ids)
    taint = update(Version).where(Version.id.in_(select(descendants.c.id)), Version.tainted_at.is_(None))
    await session.execute(taint.values(tainted_at=now()))


async def unlearn_reward_models(
    session: AsyncSession, policies: LockedPolicies, turns: Mapping[str, float], settings: Settings
) -> list[str]:
    """Taint the reward models that learned from these turns, and return their names.

    A fit that is running loses its lease and reads the remaining data again. A reward model that serves is disabled,
    and another fit is requested.

    Args:
        policies: All policies of the project.
        turns: For each turn id, when the erased feedback on it was given (Unix seconds).
    """
    tainted: list[str] = []
    for row in await reward_models.lock_fitted_on(session, turns):
        locked = policies[row.policy_id]
        if row.state == RewardModelState.OPEN:
            await _restart_fit(session, row)
        elif row.path is not None and await _has_read(session, row, turns):
            tainted.append(reward_models.reward_model_name(locked.policy, row))
            await _taint(locked, row, settings)
    return tainted


async def restart_fits(session: AsyncSession, turn_ids: Collection[str]) -> None:
    """Make running fits that read feedback on these turns lose their lease and read the remaining data again."""
    for row in await reward_models.lock_fitted_on(session, turn_ids):
        if row.state == RewardModelState.OPEN:
            await _restart_fit(session, row)


async def _has_read(session: AsyncSession, row: RewardModel, turns: Mapping[str, float]) -> bool:
    """Whether the reward model read its data after the feedback on one of these turns was given."""
    query = select(RewardModelTurn.turn_id).where(RewardModelTurn.reward_model_id == row.id)
    fitted_on = await session.scalars(query.where(RewardModelTurn.turn_id.in_(turns)))
    return row.data_read_at is not None and any(turns[turn_id] <= row.data_read_at for turn_id in fitted_on)


async def _restart_fit(session: AsyncSession, row: RewardModel) -> None:
    row.fence += 1  # a trainer that has claimed the fit must not commit it
    row.attempt = max(0, row.attempt - 1)
    row.lease_owner = row.lease_until = None
    await session.execute(delete(RewardModelTurn).where(RewardModelTurn.reward_model_id == row.id))
    enqueue_after_commit(session, "train")


async def _taint(locked: LockedPolicy, row: RewardModel, settings: Settings) -> None:
    session, policy = locked
    was_serving = row.state == RewardModelState.SERVING
    if row.tainted_at is None:
        row.tainted_at = now()
    if not was_serving:
        return
    await reward_models.disable(locked, row, actor=reward_models.ERASURE, reason=REWARD_MODEL_DATA_ERASED)
    open_fit = await reward_models.find_newest(session, policy.id, RewardModelState.OPEN)
    if open_fit is None and effective_rewards(policy, settings).reward_model is not None:
        reason = f"{reward_models.reward_model_name(policy, row)}: {REWARD_MODEL_DATA_ERASED}"
        await reward_models.create_fit(locked, actor=reward_models.ERASURE, reason=reason)
