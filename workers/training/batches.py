"""Batches at the trainer: claim one under a lease, read its samples, record the result under its fencing token."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sqlalchemy import ColumnElement, exists, func, select, update
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import aliased

from alignment import types as alignment_types
from app.core import leases
from app.core.database import Database, now
from app.core.jobs import enqueue_after_commit
from app.core.settings import Settings
from app.models import (
    AuditAction,
    Batch,
    BatchState,
    Policy,
    Sample,
    SampleState,
    Turn,
    Version,
    VersionState,
    new_id,
    record_audit,
)
from app.policies import repository
from app.projects.service import resolve_base_model
from app.training import kl_guard

UNUSED_REASON = "the algorithm had nothing to compare it with"
TRAINER = "trainer"  # the actor in audit entries
MAX_LAG = 4  # the hard cap of max_staleness: no sample of a batch is further behind


@dataclass(frozen=True)
class ClaimedBatch:
    """What the trainer needs for one update, and the row, under whose fencing token it may write the result."""

    row: Batch
    policy: Policy
    parent: Version
    number: int
    batch: alignment_types.Batch

    @property
    def adapter_name(self) -> str:
        """Return a name that is unique over all projects, since policies of two projects may have the same name."""
        return f"{self.policy.name}-{self.policy.id[-6:]}-v{self.number}"

    def directory(self, settings: Settings) -> Path:
        """Return the directory of the result. Each attempt has its own, so a late result overwrites nothing."""
        return settings.versions_dir / f"{self.adapter_name}.{self.row.id[-8:]}.{self.row.fence}"


async def claim(db: Database, owner: str, settings: Settings) -> ClaimedBatch | None:
    """Claim an open batch of a policy on this trainer's base model. Return None if there is none.

    The batch comes from the project whose last batch was claimed longest ago.
    """
    earlier_batch, earlier_policy = aliased(Batch), aliased(Policy)
    last_claimed_at = (
        select(func.max(earlier_batch.claimed_at))
        .join(earlier_policy, earlier_policy.id == earlier_batch.policy_id)
        .where(earlier_policy.project_id == Policy.project_id)
        .scalar_subquery()
    )
    async with db.write() as session:
        rows = await session.scalars(
            select(Batch)
            .join(Policy, Policy.id == Batch.policy_id)
            .where(
                Batch.state == BatchState.OPEN,
                Batch.attempt < settings.max_attempts,
                Policy.base_model == resolve_base_model(settings.model),
            )
            .order_by(func.coalesce(last_claimed_at, 0.0), Batch.created_at, Batch.id)
        )
        lease: dict[str, Any] = {"owner": owner, "seconds": settings.lease_seconds, "states": (BatchState.OPEN,)}
        for row in list(rows):
            if await leases.claim(session, Batch, row.id, **lease) is not None:
                row.claimed_at = now()
                await session.flush()
                await session.refresh(row)
                return await _read_claimed(session, row)
    return None


async def _read_claimed(session: AsyncSession, row: Batch) -> ClaimedBatch:
    policy = await session.get_one(Policy, row.policy_id)
    parent = await repository.get_version(session, row.parent_id)
    last_number = await session.scalar(select(func.max(Version.number)).where(Version.policy_id == policy.id))
    # Without the turns whose tokens were deleted, the rest of the batch can be trained.
    deleted_turn = select(Turn.id).where(Turn.id == Sample.turn_id, Turn.prompt_ids.is_(None))
    await _update_samples(session, row, exists(deleted_turn), state=SampleState.DROPPED, reason="its turn was deleted")
    rows = await session.execute(
        select(Turn, Sample.reward, Sample.group_id, Version.number)
        .join(Sample, Sample.turn_id == Turn.id)
        .join(Version, Version.id == Turn.version_id)
        .where(Sample.batch_id == row.id, Sample.state == SampleState.BATCHED)
        .order_by(Turn.created_at, Turn.id)
    )
    ancestors = await repository.list_ancestors(session, parent.id, MAX_LAG)
    lag = {version.number: steps for steps, version in enumerate(ancestors)}
    samples = tuple(
        to_sample(turn, reward, number, lag=lag.get(number, MAX_LAG), group=group)
        for turn, reward, group, number in rows
    )
    batch = alignment_types.Batch(row.id, policy.name, samples)
    return ClaimedBatch(row, policy, parent, int(last_number or 0) + 1, batch)


def to_sample(
    turn: Turn, reward: float, number: int, *, lag: int = 0, group: str | None = None
) -> alignment_types.Sample:
    """Return a recorded turn in token space; `number` is that of the version that generated it."""
    assert turn.prompt_ids and turn.output_ids and turn.logprobs, f"turn {turn.id} was never trainable"
    return alignment_types.Sample(
        turn_id=turn.id,
        prompt_ids=tuple(turn.prompt_ids),
        output_ids=tuple(turn.output_ids),
        logprobs=tuple(turn.logprobs),
        reward=reward,
        version=number,
        temperature=turn.sampling["temperature"],
        lag=lag,
        group=group or turn.completion_id,  # the choices of one completion are replies to one prompt
        conversation=turn.conversation_id,
        turn_index=len(turn.messages),  # the same for all replies to one prompt
    )


async def commit(
    db: Database, claimed: ClaimedBatch, *, metrics: dict[str, Any], unused_turn_ids: Sequence[str] = (), **values: Any
) -> bool:
    """Write the version and the trained batch in one transaction.

    Returns False if a rollback moved the head meanwhile: then the batch has failed and there is no version. Raises
    LeaseLost.

    Args:
        unused_turn_ids: the turns that the algorithm could not use, since they had no other reply to compare with.
        values: columns of the version: `adapter_path`, `manifest_sha256`, `probe`, `timings`, `full_weights`.
    """
    async with db.write() as session:
        version = Version(
            id=new_id("ver"),
            policy_id=claimed.policy.id,
            number=claimed.number,
            parent_id=claimed.parent.id,
            batch_id=claimed.row.id,
            state=VersionState.TRAINED,
            adapter_name=claimed.adapter_name,
            metrics=metrics,
            **values,
        )
        result = await session.execute(
            update(Policy)
            .where(Policy.id == claimed.policy.id, Policy.head_version_id == claimed.parent.id)
            .values(head_version_id=version.id)
        )
        if not result.rowcount:  # type: ignore[attr-defined]
            reason = f"the head left v{claimed.number}'s parent while it was trained"
            await _discard(session, claimed, BatchState.FAILED, reason)
            return False
        await _finish(session, claimed, BatchState.TRAINED, version_id=version.id, metrics=metrics)
        session.add(version)
        is_unused = Sample.turn_id.in_(unused_turn_ids)
        await _update_samples(session, claimed.row, is_unused, state=SampleState.DROPPED, reason=UNUSED_REASON)
        await _update_samples(session, claimed.row, state=SampleState.TRAINED, reason=None)
        enqueue_after_commit(session, "evaluate")
    return True


async def quarantine(db: Database, claimed: ClaimedBatch, reason: str) -> None:
    """Quarantine a batch that the update refused: not finite, foreign log-probs, or nothing to compare.

    Training goes on with other samples. Raises LeaseLost.
    """
    async with db.write() as session:
        await _discard(session, claimed, BatchState.QUARANTINED, reason)


async def halt_on_damaged_parent(db: Database, claimed: ClaimedBatch, damage: str) -> None:
    """Fail the batch, reopen its samples and halt training: every update would start from the damaged directory.

    Training is resumed by an operator who has repaired the directory or rolled back. Raises LeaseLost.
    """
    reason = f"the version that training continues from is damaged: {damage}"
    async with db.write() as session:
        policy = await session.get_one(Policy, claimed.policy.id, with_for_update={"key_share": True})
        await _finish(session, claimed, BatchState.FAILED, reason=reason)
        await _update_samples(session, claimed.row, state=SampleState.OPEN, batch_id=None)
        record_audit(session, TRAINER, AuditAction.BATCH_FAILED, claimed.row.id, reason, project_id=policy.project_id)
        kl_guard.halt(session, policy, actor=TRAINER, reason=reason)


async def record_failed_attempt(db: Database, claimed: ClaimedBatch, reason: str) -> None:
    """Audit why an attempt failed. The batch stays open and is claimed again when its lease expires."""
    async with db.write() as session:
        details: dict[str, Any] = {"project_id": claimed.policy.project_id, "attempt": claimed.row.attempt}
        record_audit(session, TRAINER, AuditAction.BATCH_ATTEMPT_FAILED, claimed.row.id, reason, **details)


async def quarantine_poisoned(db: Database, settings: Settings) -> int:
    """Quarantine the batches of which every attempt ended without a result. Return how many.

    Such a batch crashes the trainer, so training goes on without it.
    """
    async with db.write() as session:
        poisoned = list(await session.scalars(leases.select_exhausted(Batch, BatchState.OPEN, settings.max_attempts)))
        for batch in poisoned:
            batch.state = BatchState.QUARANTINED
            batch.reason = f"{batch.attempt} attempts ended without a result"
            batch.settled_at = now()
            batch.fence += 1  # a trainer that still works on it must not write
            await _update_samples(session, batch, state=SampleState.DROPPED, reason="its batch is quarantined")
            project_id = (await session.get_one(Policy, batch.policy_id)).project_id
            action = AuditAction.BATCH_QUARANTINED
            record_audit(session, "reconcile", action, batch.id, batch.reason, project_id=project_id)
            enqueue_after_commit(session, "assemble")
    return len(poisoned)


async def _discard(session: AsyncSession, claimed: ClaimedBatch, state: BatchState, reason: str) -> None:
    await _finish(session, claimed, state, reason=reason)
    dropped_reason = f"its batch is set aside: {reason}"
    await _update_samples(session, claimed.row, state=SampleState.DROPPED, reason=dropped_reason)
    action, project_id = AuditAction(f"batch.{state}"), claimed.policy.project_id
    record_audit(session, TRAINER, action, claimed.row.id, reason, project_id=project_id)
    enqueue_after_commit(session, "assemble")


async def _finish(session: AsyncSession, claimed: ClaimedBatch, state: BatchState, **values: Any) -> None:
    row = claimed.row
    await leases.finish(session, Batch, row.id, fence=row.fence, state=state, settled_at=now(), **values)


async def _update_samples(session: AsyncSession, batch: Batch, *conditions: ColumnElement[bool], **values: Any) -> None:
    """Update the samples that the batch still holds."""
    await session.execute(
        update(Sample)
        .where(Sample.batch_id == batch.id, Sample.state == SampleState.BATCHED, *conditions)
        .values(values)
    )
