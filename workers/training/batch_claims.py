"""Claims of batches at the trainer: claim one under a lease and read its samples, or hand it back."""

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy import exists, func, select, update
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import aliased

from alignment import types as alignment_types
from app.chat.histories import read_prompt_ids
from app.core import leases
from app.core.database import Database, now
from app.core.jobs import enqueue_after_commit
from app.core.settings import Settings
from app.models import (
    TRAINER,
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
    record_audit,
)
from app.policies import repository
from app.policies.locks import lock_policy
from app.projects.service import resolve_base_model
from app.training import batch_samples, sample_conditions
from app.training.policy_config import effective_rewards
from workers.feedback import corrections
from workers.training.recorded_samples import read_held_out, read_places, to_sample

CONSENT_WITHDRAWN = "its project or an API key no longer consents to training"


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
