"""Batches at the trainer: claim one under a lease, read its samples, record the result under its fencing token."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sqlalchemy import exists, func, select, update
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
from app.policies import ancestry, repository
from app.projects.bootstrap import resolve_base_model
from app.training import kl_guard

UNUSED_REASON = "the algorithm had nothing to compare it with"
MAX_LAG = 4  # the hard cap of max_staleness: no sample of a batch is further behind


@dataclass(frozen=True)
class ClaimedBatch:
    """What the trainer needs for one update, and the fencing token under which it may write the result."""

    fence: int
    attempt: int
    policy_id: str
    policy_name: str
    parent_id: str
    parent_path: str | None
    number: int
    batch: alignment_types.Batch

    @property
    def adapter_name(self) -> str:
        """Return a name that is unique over all projects, since policies of two projects may have the same name."""
        return f"{self.policy_name}-{self.policy_id[-6:]}-v{self.number}"

    def directory(self, settings: Settings) -> Path:
        """Return the directory of the result. Each attempt has its own, so a late result overwrites nothing."""
        return settings.versions_dir / f"{self.adapter_name}.{self.batch.id[-8:]}.{self.fence}"


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
        ids = await session.scalars(
            select(Batch.id)
            .join(Policy, Policy.id == Batch.policy_id)
            .where(
                Batch.state == BatchState.OPEN,
                Batch.attempt < settings.max_attempts,
                Policy.base_model == resolve_base_model(settings.model),
            )
            .order_by(func.coalesce(last_claimed_at, 0.0), Batch.created_at, Batch.id)
        )
        for batch_id in list(ids):
            fence = await leases.claim(
                session,
                Batch,
                batch_id,
                owner=owner,
                seconds=settings.lease_seconds,
                states=(BatchState.OPEN,),
            )
            if fence is not None:
                await session.execute(update(Batch).where(Batch.id == batch_id).values(claimed_at=now()))
                return await _read_claimed(session, batch_id, fence)
    return None


async def _read_claimed(session: AsyncSession, batch_id: str, fence: int) -> ClaimedBatch:
    batch = await session.get(Batch, batch_id, populate_existing=True)
    assert batch is not None
    policy = await session.get(Policy, batch.policy_id)
    assert policy is not None
    parent = await repository.get_version(session, batch.parent_id)
    last_number = await session.scalar(select(func.max(Version.number)).where(Version.policy_id == policy.id))
    await _drop_deleted_turns(session, batch_id)
    rows = await session.execute(
        select(Turn, Sample.reward, Sample.group_id, Version.number)
        .join(Sample, Sample.turn_id == Turn.id)
        .join(Version, Version.id == Turn.version_id)
        .where(Sample.batch_id == batch_id, Sample.state == SampleState.BATCHED)
        .order_by(Turn.created_at, Turn.id)
    )
    ancestors = await ancestry.list_ancestors(session, parent.id, MAX_LAG)
    lag = {version.number: steps for steps, version in enumerate(ancestors)}
    samples = tuple(
        replace(to_sample(turn, reward, number), lag=lag.get(number, MAX_LAG), group=group or turn.completion_id)
        for turn, reward, group, number in rows
    )
    return ClaimedBatch(
        fence=fence,
        attempt=batch.attempt,
        policy_id=policy.id,
        policy_name=policy.name,
        parent_id=parent.id,
        parent_path=parent.adapter_path,
        number=int(last_number or 0) + 1,
        batch=alignment_types.Batch(batch_id, policy.name, samples),
    )


async def _drop_deleted_turns(session: AsyncSession, batch_id: str) -> None:
    """Drop the samples of turns whose tokens were deleted, so that the rest of the batch can be trained."""
    deleted_turn = select(Turn.id).where(Turn.id == Sample.turn_id, Turn.prompt_ids.is_(None))
    await session.execute(
        update(Sample)
        .where(Sample.batch_id == batch_id, Sample.state == SampleState.BATCHED, exists(deleted_turn))
        .values(state=SampleState.DROPPED, reason="its turn was deleted")
        .execution_options(synchronize_session=False)
    )


def to_sample(turn: Turn, reward: float, number: int) -> alignment_types.Sample:
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
        group=turn.completion_id,  # the choices of one completion are replies to one prompt
        conversation=turn.conversation_id,
        turn_index=len(turn.messages),  # the same for all replies to one prompt
    )


async def commit(
    db: Database,
    claimed: ClaimedBatch,
    *,
    directory: Path,
    manifest_sha256: str,
    probe: dict[str, Any],
    metrics: dict[str, Any],
    timings: dict[str, Any],
    unused_turn_ids: Sequence[str] = (),
    full_weights: bool = False,
) -> bool:
    """Write the version and the trained batch in one transaction.

    Returns False if a rollback moved the head meanwhile: then the batch has failed and there is no version.
    `unused_turn_ids` are the turns that the algorithm could not use, since they had no other reply to compare with.
    Raises LeaseLost.
    """
    async with db.write() as session:
        version_id = new_id("ver")
        result = await session.execute(
            update(Policy)
            .where(Policy.id == claimed.policy_id, Policy.head_version_id == claimed.parent_id)
            .values(head_version_id=version_id)
        )
        if not result.rowcount:  # type: ignore[attr-defined]
            reason = f"the head left v{claimed.number}'s parent while it was trained"
            await _discard(session, claimed, BatchState.FAILED, reason)
            return False
        await leases.finish(
            session,
            Batch,
            claimed.batch.id,
            fence=claimed.fence,
            state=BatchState.TRAINED,
            version_id=version_id,
            metrics=metrics,
            settled_at=now(),
        )
        session.add(
            Version(
                id=version_id,
                policy_id=claimed.policy_id,
                number=claimed.number,
                parent_id=claimed.parent_id,
                batch_id=claimed.batch.id,
                state=VersionState.TRAINED,
                adapter_name=claimed.adapter_name,
                adapter_path=str(directory),
                full_weights=full_weights,
                manifest_sha256=manifest_sha256,
                probe=probe,
                metrics=metrics,
                timings=timings,
            )
        )
        await session.execute(
            update(Sample)
            .where(Sample.batch_id == claimed.batch.id, Sample.turn_id.in_(unused_turn_ids))
            .values(state=SampleState.DROPPED, reason=UNUSED_REASON)
            .execution_options(synchronize_session=False)
        )
        await _update_samples(session, claimed.batch.id, SampleState.TRAINED, None)
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
    reason = f"the version that learning goes on from is damaged: {damage}"
    async with db.write() as session:
        policy = await session.get_one(Policy, claimed.policy_id, with_for_update={"key_share": True})
        await leases.finish(
            session,
            Batch,
            claimed.batch.id,
            fence=claimed.fence,
            state=BatchState.FAILED,
            reason=reason,
            settled_at=now(),
        )
        await session.execute(
            update(Sample)
            .where(Sample.batch_id == claimed.batch.id, Sample.state == SampleState.BATCHED)
            .values(state=SampleState.OPEN, batch_id=None)
            .execution_options(synchronize_session=False)
        )
        record_audit(
            session, "trainer", AuditAction.BATCH_FAILED, claimed.batch.id, reason, project_id=policy.project_id
        )
        await kl_guard.halt(session, policy, actor="trainer", reason=reason)


async def record_failed_attempt(db: Database, claimed: ClaimedBatch, reason: str) -> None:
    """Audit why an attempt failed. The batch stays open and is claimed again when its lease expires."""
    async with db.write() as session:
        policy = await session.get_one(Policy, claimed.policy_id)
        record_audit(
            session,
            "trainer",
            AuditAction.BATCH_ATTEMPT_FAILED,
            claimed.batch.id,
            reason,
            project_id=policy.project_id,
            attempt=claimed.attempt,
        )


async def _discard(session: AsyncSession, claimed: ClaimedBatch, state: BatchState, reason: str) -> None:
    await leases.finish(
        session, Batch, claimed.batch.id, fence=claimed.fence, state=state, reason=reason, settled_at=now()
    )
    await _update_samples(session, claimed.batch.id, SampleState.DROPPED, f"its batch is set aside: {reason}")
    policy = await session.get_one(Policy, claimed.policy_id)
    record_audit(
        session, "trainer", AuditAction(f"batch.{state}"), claimed.batch.id, reason, project_id=policy.project_id
    )
    enqueue_after_commit(session, "assemble")


async def _update_samples(session: AsyncSession, batch_id: str, state: SampleState, reason: str | None) -> None:
    await session.execute(
        update(Sample)
        .where(Sample.batch_id == batch_id, Sample.state == SampleState.BATCHED)
        .values(state=state, reason=reason)
        .execution_options(synchronize_session=False)
    )


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
            await _update_samples(session, batch.id, SampleState.DROPPED, "its batch is quarantined")
            policy = await session.get_one(Policy, batch.policy_id)
            record_audit(
                session,
                "reconcile",
                AuditAction.BATCH_QUARANTINED,
                batch.id,
                batch.reason,
                project_id=policy.project_id,
            )
            enqueue_after_commit(session, "assemble")
    return len(poisoned)
