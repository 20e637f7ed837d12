"""Batches at the trainer: claim one under a lease, read its samples, record the result under its fencing token."""

import math
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType

from sqlalchemy import exists, func, select, update
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import aliased

from alignment import types as alignment_types
from alignment.types import ReturnReason
from app.chat.histories import read_prompt_ids
from app.core import leases
from app.core.database import Database, now
from app.core.jobs import enqueue_after_commit
from app.core.settings import Settings
from app.models import (
    AuditAction,
    Batch,
    BatchState,
    Policy,
    PolicyState,
    Sample,
    SampleRule,
    SampleState,
    Turn,
    Version,
    VersionState,
    new_id,
    record_audit,
)
from app.policies import repository
from app.policies.locks import LockedPolicy, lock_policy
from app.projects.service import resolve_base_model
from app.training import batch_samples, kl_guard, sample_conditions
from app.training.policy_config import effective_rewards
from workers.feedback import corrections
from workers.training.recorded_samples import read_held_out, read_places, to_sample
from workers.training.results import TrainedVersion

UNUSED_REASON = "the algorithm had nothing to compare it with"
CONSENT_WITHDRAWN = "its project or an API key no longer consents to training"
RETURN_REASONS = {
    ReturnReason.NO_CONTRAST: batch_samples.NO_CONTRAST,
    ReturnReason.STOPPED: "the update of its batch stopped at its largest KL before it learned from it",
}
TRAINER = "trainer"  # the actor in audit entries


@dataclass(frozen=True)
class ClaimedBatch:
    """What the trainer needs for one update, and the row, under whose fencing token it may write the result."""

    row: Batch
    policy: Policy
    parent: Version
    number: int
    batch: alignment_types.Batch
    num_replaced_scores: int  # samples whose automated rewards an earlier update has learned from

    @property
    def adapter_name(self) -> str:
        """Return a name that is unique over all projects, since policies of two projects may have the same name."""
        return f"{self.policy.name}-{self.policy.id[-6:]}-v{self.number}"

    def directory(self, settings: Settings) -> Path:
        """Return the directory of the result. Each attempt has its own, so a late result overwrites nothing."""
        return settings.versions_dir / f"{self.adapter_name}.{self.row.id[-8:]}.{self.row.fence}"


async def claim(db: Database, owner: str, settings: Settings) -> ClaimedBatch | None:
    """Claim an open batch of an active policy on this trainer's base model. Return None if there is none.

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
                Batch.attempt < settings.workers.max_attempts,
                leases.lease_is_free(Batch),
                Policy.base_model == resolve_base_model(settings.model),
                Policy.state == PolicyState.ACTIVE,
            )
            .order_by(func.coalesce(last_claimed_at, 0.0), Batch.created_at, Batch.id)
        )
        lease_seconds = settings.workers.lease_seconds
        for row in list(rows):
            if await _break_up_without_consent(session, row):
                continue
            if (
                await leases.claim(
                    session, Batch, row.id, owner=owner, seconds=lease_seconds, states=(BatchState.OPEN,)
                )
                is not None
            ):
                row.claimed_at = now()
                await session.flush()
                await session.refresh(row)
                return await _read_claimed(session, row, settings)
    return None


async def hand_back(db: Database, owners: Collection[str]) -> int:
    """Release the open batches of trainers that were told to stop and have ended. Return how many.

    The attempt does not count: it says nothing about the batch.
    """
    values = {"attempt": Batch.attempt - 1, "lease_owner": None, "lease_until": None}
    async with db.write() as session:
        is_owned = (Batch.state == BatchState.OPEN, Batch.lease_owner.in_(owners))
        result = await session.execute(update(Batch).where(*is_owned).values(values))
        enqueue_after_commit(session, "train")
        return int(result.rowcount)  # type: ignore[attr-defined]


async def _break_up_without_consent(session: AsyncSession, row: Batch) -> bool:
    """Refuse the batch if a sample's project or API key has withdrawn its consent, and return its samples.

    Those without consent wait until it is given again.
    """
    lacks_consent = exists().where(
        Sample.batch_id == row.id, Sample.state == SampleState.BATCHED, ~sample_conditions.has_consent()
    )
    if not await session.scalar(select(lacks_consent)):
        return False
    locked = await lock_policy(session, row.policy_id)
    if await batch_samples.break_up_batches(locked, [row.id], BatchState.REFUSED, CONSENT_WITHDRAWN):
        action, project_id = AuditAction.BATCH_REFUSED, locked.policy.project_id
        record_audit(session, TRAINER, action, row.id, CONSENT_WITHDRAWN, project_id=project_id)
    return True


async def _read_claimed(session: AsyncSession, row: Batch, settings: Settings) -> ClaimedBatch:
    policy = await session.get_one(Policy, row.policy_id)
    parent = await repository.get_version(session, row.parent_id)
    last_number = await session.scalar(select(func.max(Version.number)).where(Version.policy_id == policy.id))
    # Without the turns whose tokens were deleted, the rest of the batch can be trained.
    is_deleted = exists().where(Turn.id == Sample.turn_id, Turn.own_prompt_ids.is_(None))
    await batch_samples.drop_unlearned(session, row.id, SampleRule.ERASED, batch_samples.ERASED, is_deleted)
    result = await session.execute(
        select(
            *(Turn, Sample.reward, Sample.weight, Sample.group_id),
            *(Sample.turn_return, Sample.turn_reward, Sample.automated_batch_id, Version.number),
        )
        .join(Sample, Sample.turn_id == Turn.id)
        .join(Version, Version.id == Turn.version_id)
        .where(Sample.batch_id == row.id, Sample.state == SampleState.BATCHED)
        .order_by(Turn.created_at, Turn.id)
    )
    rows = result.all()
    prompt_ids = await read_prompt_ids(session, [turn.id for turn, *_ in rows])
    lags = await _count_updates(session, parent, min((number for *_, number in rows), default=parent.number))
    is_by_return = effective_rewards(policy, settings).episode_credit == "return"
    places = await read_places(session, [turn for turn, *_ in rows]) if is_by_return else {}
    samples = tuple(
        # A version that was rolled back is no ancestor: its distance is counted in versions.
        to_sample(
            turn,
            prompt_ids[turn.id],
            reward,
            number,
            lag=lags.get(number, abs(parent.number - number)),
            group=group,
            place=places.get(turn.id),
            turn_return=turn_return,
            turn_reward=turn_reward,
            weight=weight,
        )
        for turn, reward, weight, group, turn_return, turn_reward, _, number in rows
    )
    num_replaced = sum(automated_batch_id is not None for *_, automated_batch_id, _ in rows)
    held_out = await read_held_out(session, row, parent, {sample.turn_id for sample in samples})
    corrected = await corrections.read_corrected(session, row.id, {sample.turn_id: sample for sample in samples})
    batch = alignment_types.Batch(row.id, policy.name, samples, held_out, tuple(corrected))
    return ClaimedBatch(row, policy, parent, int(last_number or 0) + 1, batch, num_replaced)


async def _count_updates(session: AsyncSession, parent: Version, oldest: int) -> dict[int, int]:
    """Return the number of updates from each ancestor to the parent, by version number; `oldest` is the first one."""
    is_between = Version.number.between(oldest, parent.number)
    rows = await session.execute(
        select(Version.id, Version.number, Version.parent_id).where(Version.policy_id == parent.policy_id, is_between)
    )
    versions = {id: (number, parent_id) for id, number, parent_id in rows}
    counts: dict[int, int] = {}
    id: str | None = parent.id
    while id in versions:
        number, id = versions[id]
        counts[number] = len(counts)
    return counts


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
