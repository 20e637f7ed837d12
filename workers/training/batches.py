"""A batch's life at the trainer: claimed by lease, read as samples, settled under its fence."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sqlalchemy import exists, func, select, update
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import aliased

from alignment import types as workshop
from app.core import leases
from app.core.database import Database, now
from app.core.jobs import enqueue_after_commit
from app.core.settings import Settings
from app.models import Batch, BatchState, Policy, Sample, SampleState, Turn, Version, VersionState, new_id, record_audit
from app.policies import repository
from app.projects.bootstrap import base_model
from app.training import kl_guard

LEFT_OUT = "the algorithm had nothing to compare it with"
MOST_STALE = 4  # the hard cap of max_staleness: no sample of a batch is further behind


@dataclass(frozen=True)
class Claimed:
    """What the trainer needs for one update, and the fence under which it may write the result."""

    fence: int
    attempt: int
    policy_id: str
    policy_name: str
    parent_id: str
    parent_path: str | None
    number: int
    batch: workshop.Batch

    @property
    def adapter_name(self) -> str:
        """Unique over all projects: two of them may call their policies the same."""
        return f"{self.policy_name}-{self.policy_id[-6:]}-v{self.number}"

    def directory(self, settings: Settings) -> Path:
        """Never reused: a result that was not committed in time must not lie where the next attempt's will."""
        return settings.versions_dir / f"{self.adapter_name}.{self.batch.id[-8:]}.{self.fence}"


async def claim(db: Database, owner: str, settings: Settings) -> Claimed | None:
    """An open batch that nobody works on, or None; of the project that has waited longest for its turn.

    A trainer holds one base model: policies that learn on another are not its own.
    """
    before, owned = aliased(Batch), aliased(Policy)
    last_turn = (
        select(func.max(before.claimed_at))
        .join(owned, owned.id == before.policy_id)
        .where(owned.project_id == Policy.project_id)
        .scalar_subquery()
    )
    async with db.write() as session:
        ids = await session.scalars(
            select(Batch.id)
            .join(Policy, Policy.id == Batch.policy_id)
            .where(
                Batch.state == BatchState.OPEN,
                Batch.attempt < settings.max_attempts,
                Policy.base_model == base_model(settings.model),
            )
            .order_by(func.coalesce(last_turn, 0.0), Batch.created_at, Batch.id)
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
                return await _read(session, batch_id, fence)
    return None


async def _read(session: AsyncSession, batch_id: str, fence: int) -> Claimed:
    batch = await session.get(Batch, batch_id, populate_existing=True)
    assert batch is not None
    policy = await session.get(Policy, batch.policy_id)
    assert policy is not None
    parent = await repository.version(session, batch.parent_id)
    newest = await session.scalar(select(func.max(Version.number)).where(Version.policy_id == policy.id))
    await _drop_unreadable(session, batch_id)
    rows = await session.execute(
        select(Turn, Sample.reward, Sample.group_id, Version.number)
        .join(Sample, Sample.turn_id == Turn.id)
        .join(Version, Version.id == Turn.version_id)
        .where(Sample.batch_id == batch_id, Sample.state == SampleState.BATCHED)
        .order_by(Turn.created_at, Turn.id)
    )
    line = await repository.ancestry(session, parent.id, MOST_STALE)
    lag = {version.number: steps for steps, version in enumerate(line)}
    samples = tuple(
        replace(sample(turn, reward, number), lag=lag.get(number, MOST_STALE), group=group or turn.completion_id)
        for turn, reward, group, number in rows
    )
    return Claimed(
        fence=fence,
        attempt=batch.attempt,
        policy_id=policy.id,
        policy_name=policy.name,
        parent_id=parent.id,
        parent_path=parent.adapter_path,
        number=int(newest or 0) + 1,
        batch=workshop.Batch(batch_id, policy.name, samples),
    )


async def _drop_unreadable(session: AsyncSession, batch_id: str) -> None:
    """A turn whose tokens are gone must cost its own sample and no more: not the claim, which would never end."""
    gone = select(Turn.id).where(Turn.id == Sample.turn_id, Turn.prompt_ids.is_(None))
    await session.execute(
        update(Sample)
        .where(Sample.batch_id == batch_id, Sample.state == SampleState.BATCHED, exists(gone))
        .values(state=SampleState.DROPPED, reason="its turn was deleted")
        .execution_options(synchronize_session=False)
    )


def sample(turn: Turn, reward: float, number: int) -> workshop.Sample:
    """A recorded turn in token space, as version `number` spoke it."""
    assert turn.prompt_ids and turn.output_ids and turn.logprobs, f"turn {turn.id} was never trainable"
    return workshop.Sample(
        turn_id=turn.id,
        prompt_ids=tuple(turn.prompt_ids),
        output_ids=tuple(turn.output_ids),
        logprobs=tuple(turn.logprobs),
        reward=reward,
        version=number,
        temperature=turn.sampling["temperature"],
        group=turn.completion_id,  # the choices of one completion are replies to one prompt
        conversation=turn.conversation_id,
        turn=len(turn.messages),  # the same for all replies to one prompt
    )


async def commit(
    db: Database,
    claimed: Claimed,
    *,
    path: Path,
    manifest_sha256: str,
    probe: dict[str, Any],
    metrics: dict[str, Any],
    timings: dict[str, Any],
    left_out: Sequence[str] = (),
    full: bool = False,
) -> bool:
    """Version and batch together, or neither. False when a rollback moved the head meanwhile: the work is void.

    `left_out` turns were in the batch and taught nothing: no other reply was there to compare them with.
    """
    async with db.write() as session:
        version_id = new_id("ver")
        moved = await session.execute(
            update(Policy)
            .where(Policy.id == claimed.policy_id, Policy.head_version_id == claimed.parent_id)
            .values(head_version_id=version_id)
        )
        if not moved.rowcount:  # type: ignore[attr-defined]
            reason = f"the head left v{claimed.number}'s parent while it was trained"
            await _give_up(session, claimed, BatchState.FAILED, reason)
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
                adapter_path=str(path),
                full_weights=full,
                manifest_sha256=manifest_sha256,
                probe=probe,
                metrics=metrics,
                timings=timings,
            )
        )
        await session.execute(
            update(Sample)
            .where(Sample.batch_id == claimed.batch.id, Sample.turn_id.in_(left_out))
            .values(state=SampleState.DROPPED, reason=LEFT_OUT)
            .execution_options(synchronize_session=False)
        )
        await _samples(session, claimed.batch.id, SampleState.TRAINED, None)
        enqueue_after_commit(session, "evaluate")
    return True


async def quarantine(db: Database, claimed: Claimed, reason: str) -> None:
    """The update itself refused (not finite, foreign log-probs, nothing to compare): set aside with the reason, and
    learning goes on with other samples."""
    async with db.write() as session:
        await _give_up(session, claimed, BatchState.QUARANTINED, reason)


async def parent_damaged(db: Database, claimed: Claimed, damage: str) -> None:
    """Every update would start from the same directory: learning is halted until somebody has mended it or rolled
    back, and what was to be learned waits."""
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
        record_audit(session, "trainer", "batch failed", claimed.batch.id, reason, project_id=policy.project_id)
        await kl_guard.halt(session, policy, actor="trainer", reason=reason)


async def _give_up(session: AsyncSession, claimed: Claimed, state: BatchState, reason: str) -> None:
    await leases.finish(
        session, Batch, claimed.batch.id, fence=claimed.fence, state=state, reason=reason, settled_at=now()
    )
    await _samples(session, claimed.batch.id, SampleState.DROPPED, f"its batch is set aside: {reason}")
    policy = await session.get_one(Policy, claimed.policy_id)
    record_audit(session, "trainer", f"batch {state}", claimed.batch.id, reason, project_id=policy.project_id)
    enqueue_after_commit(session, "assemble")


async def _samples(session: AsyncSession, batch_id: str, state: SampleState, reason: str | None) -> None:
    await session.execute(
        update(Sample)
        .where(Sample.batch_id == batch_id, Sample.state == SampleState.BATCHED)
        .values(state=state, reason=reason)
        .execution_options(synchronize_session=False)
    )


async def quarantine_poisoned(db: Database, settings: Settings) -> int:
    """A batch whose every attempt ended without a word has taken the trainer down: set it aside, go on learning."""
    async with db.write() as session:
        poisoned = list(await session.scalars(leases.select_exhausted(Batch, BatchState.OPEN, settings.max_attempts)))
        for batch in poisoned:
            batch.state = BatchState.QUARANTINED
            batch.reason = f"{batch.attempt} attempts ended without a result"
            batch.settled_at = now()
            batch.fence += 1  # a trainer that still works on it must not write
            await _samples(session, batch.id, SampleState.DROPPED, "its batch is quarantined")
            policy = await session.get_one(Policy, batch.policy_id)
            record_audit(
                session, "reconcile", "batch quarantined", batch.id, batch.reason, project_id=policy.project_id
            )
            enqueue_after_commit(session, "assemble")
    return len(poisoned)
