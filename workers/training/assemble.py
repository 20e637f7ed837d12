"""Freeze ready samples into batches. Freshness, size and variance are decided here and nowhere else."""

from sqlalchemy import exists, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from alignment.errors import NoVariance
from alignment.types import check_variance
from app.core.database import Database, database_time, now
from app.core.jobs import enqueue_after_commit
from app.core.settings import Settings
from app.models import (
    ONCE_LIVE,
    AuditAction,
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
from workers.training.select_samples import select_samples


async def assemble(db: Database, settings: Settings) -> int:
    """Freeze at most one batch per policy. Return how many were frozen."""
    async with db.read() as session:
        policy_ids = list(await session.scalars(select(Policy.id).where(Policy.mode != LearningMode.HALTED)))
    num_frozen = 0
    for policy_id in policy_ids:
        async with db.write() as session:
            num_frozen += await _assemble(session, policy_id, settings)
    return num_frozen


async def _assemble(session: AsyncSession, policy_id: str, settings: Settings) -> bool:
    policy = await session.get(Policy, policy_id, with_for_update={"key_share": True})
    assert policy is not None and policy.head_version_id is not None
    head = await repository.get_version(session, policy.head_version_id)
    has_open_batch = await session.scalar(
        select(exists().where(Batch.policy_id == policy_id, Batch.state == BatchState.OPEN))
    )
    if policy.mode == LearningMode.HALTED or has_open_batch or head.state not in ONCE_LIVE:
        return False  # one update at a time, and only from a version that was released
    fresh_versions = await repository.list_ancestors(session, head.id, settings.max_staleness)
    await _drop_stale_samples(session, policy_id, fresh_versions, head)
    versions = fresh_versions[:1] if policy.mode == LearningMode.SYNCHRONOUS else fresh_versions
    samples = await _select_batch(session, policy, [version.id for version in versions], settings)
    if not samples or await _must_wait_for_old_samples(session, samples, fresh_versions, settings):
        return False
    await _freeze(session, policy, head, samples)
    return True


async def _select_batch(
    session: AsyncSession, policy: Policy, version_ids: list[str], settings: Settings
) -> list[Sample]:
    """Return a full batch, a smaller one if its oldest sample waited long enough or an operator triggered it, or []."""
    samples = await select_samples(session, policy.id, version_ids, settings.batch_size, settings)
    if len(samples) < settings.batch_size:
        is_triggered = await service.is_triggered(session, policy)
        min_samples = service.MIN_TRIGGERED_SAMPLES if is_triggered else settings.smallest_batch
        if len(samples) < min_samples:
            return []
        waited_seconds = await database_time(session) - min(sample.ready_at for sample in samples)
        if not is_triggered and waited_seconds < settings.max_wait_seconds:
            return []
        # The caps are shares of the batch: a smaller batch has lower caps.
        samples = await select_samples(session, policy.id, version_ids, len(samples), settings)
        if len(samples) < min_samples:
            return []
    raters = {sample.rater for sample in samples if sample.rater is not None}
    num_without_rater = sum(sample.rater is None for sample in samples)
    return samples if len(raters) + num_without_rater >= settings.min_raters else []


async def _must_wait_for_old_samples(
    session: AsyncSession, samples: list[Sample], fresh_versions: list[Version], settings: Settings
) -> bool:
    """Return whether samples that this update would make stale become ready soon, with `on_stale = "wait"`.

    The wait ends when the newest of the selected samples has waited for `max_wait_seconds`.
    """
    if settings.on_stale == "drop" or len(fresh_versions) <= settings.max_staleness:
        return False
    time = await database_time(session)
    if time - max(sample.ready_at for sample in samples) >= settings.max_wait_seconds:
        return False
    oldest = fresh_versions[-1]
    becomes_ready = exists().where(
        Sample.policy_id == oldest.policy_id,
        Sample.version_id == oldest.id,
        Sample.state == SampleState.OPEN,
        Sample.ready_at > time,
        Sample.ready_at < time + settings.max_wait_seconds,
    )
    return bool(await session.scalar(select(becomes_ready)))


async def _drop_stale_samples(
    session: AsyncSession, policy_id: str, fresh_versions: list[Version], head: Version
) -> None:
    """Drop the samples of versions too far behind the head, or no ancestor of it after a rollback."""
    await session.execute(
        update(Sample)
        .where(
            Sample.policy_id == policy_id,
            Sample.state == SampleState.OPEN,
            Sample.version_id.not_in([version.id for version in fresh_versions]),
        )
        .values(
            state=SampleState.DROPPED,
            reason=f"stale: more than {len(fresh_versions) - 1} updates behind v{head.number}",
        )
    )


async def _freeze(session: AsyncSession, policy: Policy, head: Version, samples: list[Sample]) -> None:
    """Create the batch and enqueue its training, or refuse it if its rewards have no variance."""
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
        sample.batch_id, sample.state = batch.id, SampleState.BATCHED
    try:
        check_variance([sample.reward for sample in samples])
        enqueue_after_commit(session, "train")
    except NoVariance as error:
        batch.state, batch.reason, batch.settled_at = BatchState.REFUSED, str(error), now()
        for sample in samples:
            sample.state, sample.reason = SampleState.DROPPED, "its batch was refused"
        details = {"project_id": policy.project_id, "policy": policy.name}
        record_audit(session, "assemble", AuditAction.BATCH_REFUSED, batch.id, str(error), **details)
        enqueue_after_commit(session, "assemble")
