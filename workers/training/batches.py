"""Results of claimed batches: record the version, or why there is none, under the batch's fencing token."""

import math
from collections.abc import Mapping
from dataclasses import asdict
from types import MappingProxyType

from sqlalchemy import update
from sqlalchemy.ext.asyncio import AsyncSession

from alignment.types import ReturnReason
from app.core import leases
from app.core.database import Database, now
from app.core.jobs import enqueue_after_commit
from app.core.settings import Settings
from app.models import (
    TRAINER,
    AuditAction,
    Batch,
    BatchState,
    Sample,
    SampleRule,
    Turn,
    Version,
    VersionState,
    new_id,
    record_audit,
)
from app.policies.locks import LockedPolicy, lock_policy
from app.training import batch_samples, kl_guard
from workers.feedback import corrections
from workers.training.batch_claims import ClaimedBatch
from workers.training.results import TrainedVersion

UNUSED_REASON = "the algorithm had nothing to compare it with"
RETURN_REASONS = {
    ReturnReason.NO_CONTRAST: batch_samples.NO_CONTRAST,
    ReturnReason.STOPPED: "the update of its batch stopped at its largest KL before it learned from it",
}


def update_metrics(claimed: ClaimedBatch, trained: TrainedVersion) -> dict[str, float]:
    """Return the metrics of an update. Some may not be finite."""
    return trained.report.metrics | {"training/scores_replaced": float(claimed.num_replaced_scores)}


async def commit(db: Database, claimed: ClaimedBatch, trained: TrainedVersion) -> bool:
    """Write the version and the trained batch in one transaction.

    Returns False if a rollback moved the head meanwhile: then the batch has failed and there is no version. Raises
    LeaseLost.
    """
    metrics = {name: value for name, value in update_metrics(claimed, trained).items() if math.isfinite(value)}
    report = trained.report
    async with db.write() as session:
        version = Version(
            id=new_id("ver"),
            policy_id=claimed.policy.id,
            number=claimed.number,
            parent_id=claimed.parent.id,
            batch_id=claimed.row.id,
            state=VersionState.TRAINED,
            adapter_name=claimed.adapter_name,
            adapter_path=str(trained.directory),
            manifest_sha256=trained.manifest_sha256,
            full_weights=trained.is_full_weights,
            probe=asdict(trained.probe),
            metrics=metrics,
            timings=asdict(trained.timings),
        )
        locked = await lock_policy(session, claimed.policy.id)
        if locked.policy.head_version_id != claimed.parent.id:
            reason = f"the head left v{claimed.number}'s parent while it was trained"
            await _discard(locked, claimed, BatchState.FAILED, reason, f"its batch failed: {reason}")
            return False
        locked.policy.head_version_id = version.id
        await _finish(session, claimed, BatchState.TRAINED, version_id=version.id, metrics=metrics)
        session.add(version)
        await _exclude(session, claimed, report.foreign_turns)
        unused = (SampleRule.NOTHING_TO_COMPARE, UNUSED_REASON, Sample.turn_id.in_(report.unused_turn_ids))
        await batch_samples.drop_unlearned(session, claimed.row.id, *unused)
        for reason in ReturnReason:
            turn_ids = [turn_id for turn_id, why in report.returned_turns.items() if why == reason]
            await batch_samples.return_unlearned(locked, claimed.row.id, turn_ids, RETURN_REASONS[reason])
        await corrections.record_unused(session, report.unused_texts)
        await batch_samples.mark_trained(locked, claimed.row.id)
        enqueue_after_commit(session, "evaluate")
    return True


async def quarantine(db: Database, claimed: ClaimedBatch, reason: str) -> None:
    """Quarantine a batch that the update refused, since it was not finite or had foreign log-probs.

    Its samples return, and the next batches of them are smaller, so that a sample that no update can use is isolated.
    Raises LeaseLost.
    """
    async with db.write() as session:
        locked = await lock_policy(session, claimed.policy.id)
        why, exhausted = f"its batch is quarantined: {reason}", SampleRule.UNTRAINABLE
        await _discard(locked, claimed, BatchState.QUARANTINED, reason, why, exhausted)


async def refuse(
    db: Database, claimed: ClaimedBatch, reason: str, foreign_turns: Mapping[str, str] = MappingProxyType({})
) -> None:
    """Refuse a batch in which the algorithm had nothing to compare, at least without the foreign turns.

    Its other samples return and wait until new samples are ready. Raises LeaseLost.
    """
    async with db.write() as session:
        locked = await lock_policy(session, claimed.policy.id)
        await _exclude(session, claimed, foreign_turns)
        await _discard(locked, claimed, BatchState.REFUSED, reason, batch_samples.NO_CONTRAST)


async def halt_on_damaged_parent(db: Database, claimed: ClaimedBatch, damage: str) -> None:
    """Fail the batch, return its samples and halt training: every update would start from the damaged directory.

    Training is resumed by an operator who has repaired the directory or rolled back. Raises LeaseLost.
    """
    reason = f"the version that training continues from is damaged: {damage}"
    async with db.write() as session:
        locked = await lock_policy(session, claimed.policy.id)
        await _finish(session, claimed, BatchState.FAILED, reason=reason)
        await batch_samples.return_samples(locked, [claimed.row.id], f"its batch failed: {reason}")
        record_audit(
            session, TRAINER, AuditAction.BATCH_FAILED, claimed.row.id, reason, project_id=claimed.policy.project_id
        )
        kl_guard.halt(locked, actor=TRAINER, reason=reason)


async def record_failed_attempt(db: Database, claimed: ClaimedBatch, reason: str) -> None:
    """Audit why an attempt failed. The batch stays open and is claimed again when its lease expires."""
    async with db.write() as session:
        record_audit(
            session,
            TRAINER,
            AuditAction.BATCH_ATTEMPT_FAILED,
            claimed.row.id,
            reason,
            project_id=claimed.policy.project_id,
            attempt=claimed.row.attempt,
        )


async def quarantine_poisoned(db: Database, settings: Settings) -> int:
    """Quarantine the batches of which every attempt ended without a result. Return how many.

    Such a batch crashes the trainer. Its samples return like those of a batch that the update refused.
    """
    exhausted = leases.select_exhausted(Batch, BatchState.OPEN, settings.workers.max_attempts)
    async with db.write() as session:
        poisoned = [(batch.id, batch.policy_id) for batch in await session.scalars(exhausted)]
    num_quarantined = 0
    for batch_id, policy_id in poisoned:
        async with db.write() as session:  # the policy is locked before its batch, as everywhere
            locked = await lock_policy(session, policy_id)
            batch = await session.scalar(exhausted.where(Batch.id == batch_id))
            if batch is None:
                continue
            reason = f"{batch.attempt} attempts ended without a result"
            why, action = f"its batch is quarantined: {reason}", AuditAction.BATCH_QUARANTINED
            batch.state, batch.reason, batch.settled_at = BatchState.QUARANTINED, reason, now()
            batch.fence += 1  # a trainer that still works on it must not write
            await batch_samples.return_samples(locked, [batch.id], why, SampleRule.UNTRAINABLE)
            record_audit(session, "reconcile", action, batch_id, reason, project_id=locked.policy.project_id)
            num_quarantined += 1
    return num_quarantined


async def _exclude(session: AsyncSession, claimed: ClaimedBatch, turns: Mapping[str, str]) -> None:
    """Exclude these turns of the batch from training for good. `turns` has the reasons."""
    for turn_id, reason in turns.items():
        await session.execute(update(Turn).where(Turn.id == turn_id).values(exclusion_reason=reason))
        is_turn = Sample.turn_id == turn_id
        await batch_samples.drop_unlearned(session, claimed.row.id, SampleRule.EXCLUDED, reason, is_turn)


async def _discard(
    locked: LockedPolicy,
    claimed: ClaimedBatch,
    state: BatchState,
    reason: str,
    why_returned: str,
    exhausted: SampleRule | None = None,
) -> None:
    session = locked.session
    await _finish(session, claimed, state, reason=reason)
    await batch_samples.return_samples(locked, [claimed.row.id], why_returned, exhausted)
    action, project_id = AuditAction(f"batch.{state}"), claimed.policy.project_id
    record_audit(session, TRAINER, action, claimed.row.id, reason, project_id=project_id)


async def _finish(session: AsyncSession, claimed: ClaimedBatch, state: BatchState, **values: object) -> None:
    row = claimed.row
    await leases.finish(session, Batch, row.id, fence=row.fence, state=state, settled_at=now(), **values)
