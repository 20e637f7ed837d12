"""Reward models: create a fit when there is enough feedback, claim it, and record its result under its fencing token.

A serving reward model that disagrees with human feedback is disabled, and another fit is created.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sqlalchemy import delete, insert, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from alignment.config.rewards import LearnedSource
from alignment.reward_model.dataset import PreferenceDataset
from app.core import leases
from app.core.database import Database, now
from app.core.leases import lease_is_free
from app.core.settings import Settings
from app.models import RANKING_KINDS, AuditAction, Policy, RewardModel, RewardModelState, RewardModelTurn, record_audit
from app.projects.bootstrap import resolve_base_model
from app.training.reward_config import effective_rewards
from app.training.reward_models import human_labels, repository, service
from workers.training import preference_data

NOT_CONFIGURED = "the policy has no learned reward source"


@dataclass(frozen=True)
class ClaimedFit:
    """What the trainer needs for one fit, and the fencing token under which it may write the result."""

    id: str
    fence: int
    attempt: int
    number: int
    policy_id: str
    policy_name: str
    min_agreement: float
    dataset: PreferenceDataset

    @property
    def name(self) -> str:
        return f"{self.policy_name}/rm-{self.number}"

    def directory(self, settings: Settings) -> Path:
        """Return the directory for the result. No attempt shares it with another."""
        owner = f"{self.policy_name}-{self.policy_id[-6:]}"
        return settings.reward_models_dir / owner / f"rm-{self.number}.{self.fence}"


async def claim(db: Database, owner: str, settings: Settings) -> ClaimedFit | None:
    """Claim an open fit of a policy on this trainer's base model, and read its dataset. Return None if there is none.

    The turns of the dataset are recorded as the lineage of the reward model.
    """
    async with db.write() as session:
        rows = await session.scalars(
            select(RewardModel)
            .join(Policy, Policy.id == RewardModel.policy_id)
            .where(
                RewardModel.state == RewardModelState.OPEN,
                RewardModel.attempt < settings.max_attempts,
                Policy.base_model == resolve_base_model(settings.model),
                lease_is_free(RewardModel),
            )
            .order_by(RewardModel.created_at, RewardModel.id)
        )
        for row in list(rows):
            # Erasure and operators lock the policy before its reward models too. Nothing is erased during the read.
            policy = await session.get_one(Policy, row.policy_id, with_for_update={"key_share": True})
            source = effective_rewards(policy, settings).learned
            fence = await leases.claim(
                session,
                RewardModel,
                row.id,
                owner=owner,
                seconds=settings.lease_seconds,
                states=(RewardModelState.OPEN,),
            )
            if fence is None:
                continue
            if source is not None:
                await session.refresh(row)
                return await _read_claimed(session, policy, row, fence, source)
            await _finish(session, policy, row.id, fence, RewardModelState.REFUSED, row.number, NOT_CONFIGURED)
    return None


async def _read_claimed(
    session: AsyncSession, policy: Policy, row: RewardModel, fence: int, source: LearnedSource
) -> ClaimedFit:
    dataset = await preference_data.read_preferences(session, policy)
    await session.execute(delete(RewardModelTurn).where(RewardModelTurn.reward_model_id == row.id))
    if dataset.replies:
        rows = [{"reward_model_id": row.id, "turn_id": reply.turn_id} for reply in dataset.replies]
        await session.execute(insert(RewardModelTurn), rows)
    await session.execute(
        update(RewardModel)
        .where(RewardModel.id == row.id)
        .values(
            data_read_at=now(),
            last_feedback_seq=await repository.last_feedback_seq(session, policy.project_id),
            num_pairs=len(dataset.pairs),
            num_thumbs=len(dataset.labels),
            num_raters=len(dataset.raters),
        )
        .execution_options(synchronize_session=False)
    )
    return ClaimedFit(row.id, fence, row.attempt, row.number, policy.id, policy.name, source.min_agreement, dataset)


async def commit(
    db: Database, claimed: ClaimedFit, *, path: str, manifest_sha256: str, metrics: Mapping[str, Any]
) -> RewardModelState:
    """Record the fitted model. It serves and retires the previous one if `serve_when_fitted`. Raises LeaseLost."""
    async with db.write() as session:
        policy = await session.get_one(Policy, claimed.policy_id, with_for_update={"key_share": True})
        row = await session.get_one(RewardModel, claimed.id)
        state = RewardModelState.SERVING if row.serve_when_fitted else RewardModelState.TRAINED
        if row.serve_when_fitted:
            await service.retire_serving(session, policy)
        values: dict[str, Any] = {"served_at": now()} if row.serve_when_fitted else {}
        await leases.finish(
            session,
            RewardModel,
            claimed.id,
            fence=claimed.fence,
            state=state,
            actor=service.TRAINER,
            reason=None,
            path=path,
            manifest_sha256=manifest_sha256,
            metrics=dict(metrics),
            settled_at=now(),
            **values,
        )
        details: dict[str, Any] = {"agreement": metrics.get("agreement"), "words": len(claimed.dataset)}
        action = AuditAction(f"reward_model.{state}")
        record_audit(session, service.TRAINER, action, claimed.name, project_id=policy.project_id, **details)
    return state


async def refuse(db: Database, claimed: ClaimedFit, reason: str, metrics: Mapping[str, Any]) -> None:
    """Record that the fit was refused: too little data, or too little agreement. Raises LeaseLost.

    The serving reward model does not change.
    """
    async with db.write() as session:
        policy = await session.get_one(Policy, claimed.policy_id)
        state = RewardModelState.REFUSED
        await _finish(session, policy, claimed.id, claimed.fence, state, claimed.number, reason, metrics=dict(metrics))


async def record_failed_attempt(db: Database, claimed: ClaimedFit, reason: str) -> None:
    """Record and audit why an attempt failed. The fit stays open and is claimed again when its lease expires."""
    async with db.write() as session:
        policy = await session.get_one(Policy, claimed.policy_id)
        await session.execute(
            update(RewardModel)
            .where(RewardModel.id == claimed.id, RewardModel.fence == claimed.fence)
            .values(reason=reason)
            .execution_options(synchronize_session=False)
        )
        record_audit(
            session,
            service.TRAINER,
            AuditAction.REWARD_MODEL_ATTEMPT_FAILED,
            claimed.name,
            reason,
            project_id=policy.project_id,
            attempt=claimed.attempt,
        )


async def reconcile(db: Database, settings: Settings) -> None:
    """Fail fits without attempts left, disable serving models that disagree with people, and create due fits."""
    await _fail_poisoned(db, settings)
    async with db.read() as session:
        statement = select(Policy).order_by(Policy.id)
        if settings.rewards.learned is None:
            statement = statement.where(Policy.rewards.is_not(None))
        policies = await session.scalars(statement)
        configs = [(policy, effective_rewards(policy, settings).learned) for policy in policies]
    for policy, source in configs:
        if source is not None:
            await _disable_if_contradicted(db, policy, source)
            await _create_fit_if_due(db, policy, source)


async def _fail_poisoned(db: Database, settings: Settings) -> None:
    async with db.write() as session:
        poisoned = await session.scalars(
            leases.select_exhausted(RewardModel, RewardModelState.OPEN, settings.max_attempts)
        )
        for row in list(poisoned):
            policy = await session.get_one(Policy, row.policy_id)
            last_reason = f"; the last one: {row.reason}" if row.reason else ""
            reason = f"{row.attempt} attempts ended without a result{last_reason}"
            row.fence += 1  # a trainer that still works on it must not write
            await session.flush()
            state = RewardModelState.FAILED
            await _finish(session, policy, row.id, row.fence, state, row.number, reason, actor=service.RECONCILER)


async def _disable_if_contradicted(db: Database, policy: Policy, source: LearnedSource) -> None:
    async with db.read() as session:
        row = await repository.find_in_state(session, policy.id, RewardModelState.SERVING)
        if row is None:
            return
        reason = human_labels.describe_disagreement(
            await human_labels.measure_agreement(session, policy, row), source.min_agreement
        )
    if reason is not None:
        await disable(db, policy.id, row.id, service.RECONCILER, reason)


async def disable(db: Database, policy_id: str, id: str, actor: str, reason: str) -> None:
    """Disable the reward model if it still serves, and create another fit."""
    async with db.write() as session:
        policy = await session.get_one(Policy, policy_id, with_for_update={"key_share": True})
        row = await session.get_one(RewardModel, id)
        if row.state != RewardModelState.SERVING:
            return
        await service.disable(session, policy, row, actor=actor, reason=reason)
        if await repository.find_in_state(session, policy.id, RewardModelState.OPEN) is None:
            await service.create_fit(
                session, policy, actor=actor, reason=f"{repository.reward_model_name(policy, row)} is disabled"
            )


async def _create_fit_if_due(db: Database, policy: Policy, source: LearnedSource) -> None:
    """Create a fit if there is enough feedback for a first one, or enough new feedback for another."""
    async with db.read() as session:
        reason = await _find_fit_reason(session, policy, source)
    if reason is None:
        return
    async with db.write() as session:
        policy = await session.get_one(Policy, policy.id, with_for_update={"key_share": True})
        if await _find_fit_reason(session, policy, source) is not None:
            await service.create_fit(session, policy, actor=service.RECONCILER, reason=reason)


async def _find_fit_reason(session: AsyncSession, policy: Policy, source: LearnedSource) -> str | None:
    """Return why a fit is due, or None."""
    last = await repository.find_newest(session, policy.id)
    if last is None:
        num_labels = await repository.count_feedback_since(session, policy, 0, source.min_feedback)
        num_rankings = await repository.count_feedback_since(session, policy, 0, source.min_pairs, RANKING_KINDS)
        is_enough = num_labels >= source.min_feedback or num_rankings >= source.min_pairs
        return "enough feedback for a first fit" if is_enough else None
    if last.state == RewardModelState.OPEN:
        return None
    disabled = await repository.find_in_state(session, policy.id, RewardModelState.DISABLED)
    serving = await repository.find_in_state(session, policy.id, RewardModelState.SERVING)
    if serving is None and disabled is not None and disabled.actor not in service.AUTOMATIC_ACTORS:
        return None  # an operator disabled it, and only an operator enables it again
    num_labels = await repository.count_feedback_since(session, policy, last.last_feedback_seq, source.refit_after)
    return f"{num_labels} new human labels" if num_labels >= source.refit_after else None


async def _finish(
    session: AsyncSession,
    policy: Policy,
    id: str,
    fence: int,
    state: RewardModelState,
    number: int,
    reason: str,
    *,
    actor: str = service.TRAINER,
    **values: Any,
) -> None:
    await leases.finish(
        session, RewardModel, id, fence=fence, state=state, actor=actor, reason=reason, settled_at=now(), **values
    )
    record_audit(
        session,
        actor,
        AuditAction(f"reward_model.{state}"),
        f"{policy.name}/rm-{number}",
        reason,
        project_id=policy.project_id,
    )
