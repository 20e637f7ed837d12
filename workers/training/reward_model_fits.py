"""Reward models: create a fit when there is enough feedback, claim it, and record its result under its fencing token.

A serving reward model that disagrees with human feedback is disabled, and another fit is created.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from sqlalchemy import delete, insert, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from alignment.config.rewards import RewardModelSource
from alignment.reward_model.dataset import PreferenceDataset
from alignment.reward_model.prequential import PreviousFit
from app.core import leases
from app.core.database import Database, now
from app.core.leases import lease_is_free
from app.core.run_each import run_each, take_turns
from app.core.settings import Settings
from app.models import (
    RANKING_KINDS,
    TRAINER,
    AuditAction,
    Policy,
    PolicyState,
    RewardModel,
    RewardModelState,
    RewardModelTurn,
    record_audit,
)
from app.policies.locks import lock_policy
from app.projects.service import resolve_base_model
from app.training import human_labels, reward_models
from app.training.policy_config import effective_rewards
from workers.training.preference_data import read_dataset
from workers.training.results import FittedRewardModel

REFIT_GROWTH = 4  # a refit needs at least a quarter as many new labels as the last fit had, since it takes as long
NOT_CONFIGURED = "the policy has no learned reward source"


@dataclass(frozen=True)
class ClaimedFit:
    """What the trainer needs for one fit, and the row, under whose fencing token it may write the result."""

    row: RewardModel
    policy: Policy
    min_agreement: float
    dataset: PreferenceDataset
    previous: PreviousFit | None = None  # whose model predicts the votes that came since

    @property
    def name(self) -> str:
        return reward_models.reward_model_name(self.policy, self.row)

    def directory(self, settings: Settings) -> Path:
        """Return the directory for the result. No attempt shares it with another."""
        owner = f"{self.policy.name}-{self.policy.id[-6:]}"
        return settings.reward_models_dir / owner / f"rm-{self.row.number}.{self.row.fence}"


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
                RewardModel.attempt < settings.workers.max_attempts,
                Policy.base_model == resolve_base_model(settings.model),
                Policy.state == PolicyState.ACTIVE,
                lease_is_free(RewardModel),
            )
            .order_by(RewardModel.created_at, RewardModel.id)
        )
        lease_seconds = settings.workers.lease_seconds
        for row in list(rows):
            # Erasure and operators lock the policy before its reward models too. Nothing is erased during the read.
            policy = (await lock_policy(session, row.policy_id)).policy
            source = effective_rewards(policy, settings).reward_model
            if (
                await leases.claim(
                    session, RewardModel, row.id, owner=owner, seconds=lease_seconds, states=(RewardModelState.OPEN,)
                )
                is None
            ):
                continue
            await session.refresh(row)
            if source is not None:
                dataset = await _read_and_record_dataset(session, policy, row)
                previous = await _find_previous(session, policy, row)
                return ClaimedFit(row, policy, source.min_agreement, dataset, previous)
            await _finish(session, policy, row, RewardModelState.REFUSED, NOT_CONFIGURED)
    return None


async def _find_previous(session: AsyncSession, policy: Policy, row: RewardModel) -> PreviousFit | None:
    """Return the newest fit before this one that has files and has learned from nothing that is erased."""
    has_files = (RewardModel.path.is_not(None), RewardModel.manifest_sha256.is_not(None))
    earlier = (RewardModel.policy_id == policy.id, RewardModel.number < row.number, RewardModel.tainted_at.is_(None))
    query = select(RewardModel).where(*earlier, *has_files).order_by(RewardModel.number.desc()).limit(1)
    last = await session.scalar(query)
    if last is None:
        return None
    seen = await session.scalars(select(RewardModelTurn.turn_id).where(RewardModelTurn.reward_model_id == last.id))
    return PreviousFit(str(last.number), Path(last.path or ""), last.manifest_sha256 or "", frozenset(seen))


async def _read_and_record_dataset(session: AsyncSession, policy: Policy, row: RewardModel) -> PreferenceDataset:
    dataset = await read_dataset(session, policy)
    await session.execute(delete(RewardModelTurn).where(RewardModelTurn.reward_model_id == row.id))
    if dataset.replies:
        rows = [{"reward_model_id": row.id, "turn_id": reply.turn_id} for reply in dataset.replies]
        await session.execute(insert(RewardModelTurn), rows)
    row.last_feedback_seq = await human_labels.last_feedback_seq(session, policy.project_id)
    row.num_pairs, row.num_thumbs, row.num_raters = len(dataset.pairs), len(dataset.labels), len(dataset.raters)
    row.data_read_at = now()
    await session.flush()
    return dataset


async def commit(db: Database, claimed: ClaimedFit, fitted: FittedRewardModel) -> RewardModelState:
    """Record the fitted model. It serves and retires the previous one if `serve_when_fitted`. Raises LeaseLost."""
    async with db.write() as session:
        locked = await lock_policy(session, claimed.policy.id)
        row = await session.get_one(RewardModel, claimed.row.id)
        state = RewardModelState.SERVING if row.serve_when_fitted else RewardModelState.TRAINED
        values = _columns(fitted)
        if row.serve_when_fitted:
            await reward_models.retire_serving(locked)
            values["served_at"] = now()
        details = {"auc_low": fitted.metrics.get("auc_low"), "examples": len(claimed.dataset)}
        await _finish(*locked, claimed.row, state, None, details, values=values)
    return state


async def refuse(db: Database, claimed: ClaimedFit, reason: str, fitted: FittedRewardModel | None = None) -> None:
    """Record that the fit was refused: too little data, or too little evidence that it is right. Raises LeaseLost.

    The serving reward model does not change. With files its model predicts the votes until the next fit.
    """
    async with db.write() as session:
        state = RewardModelState.REFUSED
        await _finish(session, claimed.policy, claimed.row, state, reason, values=_columns(fitted))


def _columns(fitted: FittedRewardModel | None) -> dict[str, object]:
    if fitted is None:
        return {"path": None, "manifest_sha256": None, "metrics": {}}
    return {
        "path": str(fitted.directory),
        "manifest_sha256": fitted.manifest_sha256,
        "metrics": fitted.metrics,
    }


async def record_failed_attempt(db: Database, claimed: ClaimedFit, reason: str) -> None:
    """Record and audit why an attempt failed. The fit stays open and is claimed again when its lease expires."""
    row, project_id = claimed.row, claimed.policy.project_id
    async with db.write() as session:
        await session.execute(
            update(RewardModel).where(RewardModel.id == row.id, RewardModel.fence == row.fence).values(reason=reason)
        )
        action = AuditAction.REWARD_MODEL_ATTEMPT_FAILED
        record_audit(session, TRAINER, action, claimed.name, reason, project_id=project_id, attempt=row.attempt)


async def reconcile(db: Database, settings: Settings) -> None:
    """Fail fits without attempts left, disable serving models that disagree with people, and create due fits."""
    await _fail_poisoned(db, settings)
    async with db.read() as session:
        policies = await session.scalars(select(Policy).where(Policy.state == PolicyState.ACTIVE).order_by(Policy.id))
        in_turn = take_turns((policy.project_id, policy) for policy in policies)

    async def reconcile_policy(policy: Policy) -> None:
        source = effective_rewards(policy, settings).reward_model
        if source is not None:
            await _disable_if_contradicted(db, policy)
            await _create_fit_if_due(db, policy, source)

    await run_each(in_turn, reconcile_policy, "the reward model of")


async def _fail_poisoned(db: Database, settings: Settings) -> None:
    async with db.write() as session:
        poisoned = await session.scalars(
            leases.select_exhausted(RewardModel, RewardModelState.OPEN, settings.workers.max_attempts)
        )
        for row in list(poisoned):
            policy = await session.get_one(Policy, row.policy_id)
            last_reason = f"; the last one: {row.reason}" if row.reason else ""
            reason = f"{row.attempt} attempts ended without a result{last_reason}"
            row.fence += 1  # a trainer that still works on it must not write
            await session.flush()
            await _finish(session, policy, row, RewardModelState.FAILED, reason, actor=reward_models.RECONCILER)


async def _disable_if_contradicted(db: Database, policy: Policy) -> None:
    async with db.read() as session:
        row = await reward_models.find_newest(session, policy.id, RewardModelState.SERVING)
        if row is None:
            return
        measured = await human_labels.measure_agreement(session, policy, row)
    reason = human_labels.describe_disagreement(measured)
    if reason is not None:
        await disable(db, policy.id, row.id, reason, actor=reward_models.RECONCILER)
    elif measured.evidence.num_votes >= human_labels.MIN_LABELS:
        await _record_bound(db, row, round(measured.evidence.bounds().low, 2))


async def _record_bound(db: Database, row: RewardModel, low: float) -> None:
    """Record the lower bound of how well the serving model orders replies, which its scores are weighted with."""
    if row.metrics.get(reward_models.SERVING_AUC_LOW) == low:
        return
    async with db.write() as session:
        current = await session.get_one(RewardModel, row.id, with_for_update=True)
        if current.state == RewardModelState.SERVING:
            current.metrics = current.metrics | {reward_models.SERVING_AUC_LOW: low}


async def disable(db: Database, policy_id: str, id: str, reason: str, *, actor: str = TRAINER) -> None:
    """Disable the reward model if it still serves, and create another fit."""
    async with db.write() as session:
        locked = await lock_policy(session, policy_id)
        row = await session.get_one(RewardModel, id)
        if row.state != RewardModelState.SERVING:
            return
        await reward_models.disable(locked, row, actor=actor, reason=reason)
        if await reward_models.find_newest(session, policy_id, RewardModelState.OPEN) is None:
            fit_reason = f"{reward_models.reward_model_name(locked.policy, row)} is disabled"
            await reward_models.create_fit(locked, actor=actor, reason=fit_reason)


async def _create_fit_if_due(db: Database, policy: Policy, source: RewardModelSource) -> None:
    """Create a fit if there is enough feedback for a first one, or enough new feedback for another."""
    async with db.read() as session:
        reason = await _find_fit_reason(session, policy, source)
    if reason is None:
        return
    async with db.write() as session:
        locked = await lock_policy(session, policy.id)
        if await _find_fit_reason(session, locked.policy, source) is not None:
            await reward_models.create_fit(locked, actor=reward_models.RECONCILER, reason=reason)


async def _find_fit_reason(session: AsyncSession, policy: Policy, source: RewardModelSource) -> str | None:
    """Return why a fit is due, or None."""
    last = await reward_models.find_newest(session, policy.id)
    if last is None:
        num_labels = await human_labels.count_feedback_since(session, policy, 0, source.min_feedback)
        num_rankings = await human_labels.count_feedback_since(session, policy, 0, source.min_pairs, RANKING_KINDS)
        is_enough = num_labels >= source.min_feedback or num_rankings >= source.min_pairs
        return "enough feedback for a first fit" if is_enough else None
    if last.state == RewardModelState.OPEN:
        return None
    disabled = await reward_models.find_newest(session, policy.id, RewardModelState.DISABLED)
    serving = await reward_models.find_newest(session, policy.id, RewardModelState.SERVING)
    if serving is None and disabled is not None and disabled.actor not in reward_models.AUTOMATIC_ACTORS:
        return None  # an operator disabled it, and only an operator enables it again
    num_fitted = (last.num_thumbs or 0) + (last.num_pairs or 0)
    num_needed = max(source.refit_after, num_fitted // REFIT_GROWTH)
    num_labels = await human_labels.count_feedback_since(session, policy, last.last_feedback_seq, num_needed)
    return f"{num_labels} new human labels" if num_labels >= num_needed else None


async def _finish(
    session: AsyncSession,
    policy: Policy,
    row: RewardModel,
    state: RewardModelState,
    reason: str | None,
    details: Mapping[str, object] = MappingProxyType({}),
    *,
    actor: str = TRAINER,
    values: Mapping[str, object] = MappingProxyType({}),
) -> None:
    """Write the final state and `values` under the row's fence, and audit it with `details`. Raises LeaseLost."""
    await leases.finish(
        session,
        RewardModel,
        row.id,
        fence=row.fence,
        state=state,
        actor=actor,
        reason=reason,
        settled_at=now(),
        **values,
    )
    name, action = reward_models.reward_model_name(policy, row), AuditAction(f"reward_model.{state}")
    record_audit(session, actor, action, name, reason, project_id=policy.project_id, **details)
