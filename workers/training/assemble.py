"""Samples → Batch. The one place where freshness, size and variance are decided."""

from sqlalchemy import exists, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from alignment.errors import NoVariance
from alignment.types import check_variance
from app.core.database import Database, database_time, now
from app.core.jobs import enqueue_after_commit
from app.core.settings import Settings
from app.models import (
    ONCE_LIVE,
    Batch,
    BatchState,
    LearningMode,
    Policy,
    Sample,
    SampleState,
    Version,
    new_id,
    record_audit,
)
from app.policies import repository
from app.training import service
from workers.training.select_samples import choose


async def assemble(db: Database, settings: Settings) -> int:
    """Freeze at most one batch per policy. Returns how many were frozen."""
    async with db.read() as session:
        policies = list(await session.scalars(select(Policy.id).where(Policy.mode != LearningMode.HALTED)))
    frozen = 0
    for policy_id in policies:
        async with db.write() as session:
            frozen += await _assemble(session, policy_id, settings)
    return frozen


async def _assemble(session: AsyncSession, policy_id: str, settings: Settings) -> bool:
    policy = await session.get(Policy, policy_id, with_for_update={"key_share": True})
    assert policy is not None and policy.head_version_id is not None
    head = await repository.version(session, policy.head_version_id)
    waiting = await session.scalar(select(exists().where(Batch.policy_id == policy_id, Batch.state == BatchState.OPEN)))
    if policy.mode == LearningMode.HALTED or waiting or head.state not in ONCE_LIVE:
        return False  # one update at a time, on a version that has come home
    fresh = await repository.ancestry(session, head.id, settings.max_staleness)
    await _drop_stale(session, policy_id, fresh, head)
    speakers = fresh[:1] if policy.mode == LearningMode.SYNCHRONOUS else fresh
    samples = await _enough(session, policy, [version.id for version in speakers], settings)
    if not samples or await _waits_for_the_old(session, samples, fresh, settings):
        return False
    await _freeze(session, policy, head, samples)
    return True


async def _enough(session: AsyncSession, policy: Policy, version_ids: list[str], settings: Settings) -> list[Sample]:
    """A whole batch; a smaller one when its first sample has waited too long, or at an operator's word."""
    samples = await choose(session, policy.id, version_ids, settings.batch_size, settings)
    if len(samples) < settings.batch_size:
        told = await service.triggered(session, policy)
        smallest = service.FEWEST if told else settings.smallest_batch
        if len(samples) < smallest or not (told or await _late(session, samples, settings)):
            return []
        # What is a fair share of a whole batch may be too much of a small one.
        samples = await choose(session, policy.id, version_ids, len(samples), settings)
        if len(samples) < smallest:
            return []
    raters = {sample.rater for sample in samples if sample.rater is not None}
    machines = sum(sample.rater is None for sample in samples)
    return samples if len(raters) + machines >= settings.min_raters else []


async def _late(session: AsyncSession, samples: list[Sample], settings: Settings) -> bool:
    return await database_time(session) - min(sample.ready_at for sample in samples) >= settings.max_wait_seconds


async def _waits_for_the_old(
    session: AsyncSession, samples: list[Sample], fresh: list[Version], settings: Settings
) -> bool:
    """With on_stale="wait": samples that this update would make too old, and that are not ripe yet, go first."""
    if settings.on_stale == "drop" or len(fresh) <= settings.max_staleness:
        return False
    at = await database_time(session)
    if at - max(sample.ready_at for sample in samples) >= settings.max_wait_seconds:
        return False
    unripe = exists().where(
        Sample.policy_id == fresh[-1].policy_id,
        Sample.version_id == fresh[-1].id,
        Sample.state == SampleState.OPEN,
        Sample.ready_at > at,
        Sample.ready_at < at + settings.max_wait_seconds,
    )
    return bool(await session.scalar(select(unripe)))


async def _drop_stale(session: AsyncSession, policy_id: str, fresh: list[Version], head: Version) -> None:
    """A sample of a version too far behind the head, or off its line after a rollback, never reaches a batch."""
    await session.execute(
        update(Sample)
        .where(
            Sample.policy_id == policy_id,
            Sample.state == SampleState.OPEN,
            Sample.version_id.not_in([version.id for version in fresh]),
        )
        .values(
            state=SampleState.DROPPED,
            reason=f"stale: more than {len(fresh) - 1} updates behind v{head.number}",
        )
        .execution_options(synchronize_session=False)
    )


async def _freeze(session: AsyncSession, policy: Policy, head: Version, samples: list[Sample]) -> None:
    batch = Batch(
        id=new_id("bat"),
        policy_id=policy.id,
        parent_id=head.id,
        state=BatchState.OPEN,
        num_samples=len(samples),
        num_raters=len({sample.rater for sample in samples if sample.rater is not None}),
    )
    session.add(batch)
    await session.flush()
    for sample in samples:
        sample.batch_id = batch.id
    try:
        check_variance([sample.reward for sample in samples])
    except NoVariance as refusal:
        batch.state, batch.reason, batch.settled_at = BatchState.REFUSED, str(refusal), now()
        for sample in samples:
            sample.state, sample.reason = SampleState.DROPPED, "its batch was refused"
        told = {"project_id": policy.project_id, "policy": policy.name}
        record_audit(session, "assemble", "batch refused", batch.id, str(refusal), **told)
        enqueue_after_commit(session, "assemble")
        return
    for sample in samples:
        sample.state = SampleState.BATCHED
    enqueue_after_commit(session, "train")
