"""Samples → Batch. The one place where freshness and variance are decided."""

from sqlalchemy import func, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from alignment.errors import NoVariance
from alignment.samples import check_variance
from app.config import Settings
from app.db import Database, now
from app.jobs import nudge
from app.models import Batch, BatchState, Policy, Sample, SampleState, Version, VersionState, new_id, record
from app.policies import repository

SETTLED = (VersionState.LIVE, VersionState.SUPERSEDED, VersionState.ROLLED_BACK)


async def assemble(db: Database, settings: Settings) -> int:
    """Freeze at most one batch per policy. Returns how many were frozen."""
    async with db.read() as session:
        policies = list(await session.scalars(select(Policy.id)))
    frozen = 0
    for policy_id in policies:
        async with db.write() as session:
            frozen += await _assemble(session, policy_id, settings)
    return frozen


async def _assemble(session: AsyncSession, policy_id: str, settings: Settings) -> bool:
    policy = await session.get(Policy, policy_id, with_for_update=True)
    assert policy is not None and policy.head_version_id is not None
    head = await repository.version(session, policy.head_version_id)
    waiting = await session.scalar(
        select(func.count()).select_from(Batch).where(Batch.policy_id == policy_id, Batch.state == BatchState.OPEN)
    )
    if waiting or head.state not in SETTLED:  # one update at a time, on a version that has come home
        return False
    fresh = await repository.ancestry(session, head.id, settings.max_staleness)
    await _drop_stale(session, policy_id, fresh, head)
    samples = list(
        await session.scalars(
            select(Sample)
            .where(Sample.policy_id == policy_id, Sample.state == SampleState.OPEN)
            .order_by(Sample.created_at, Sample.turn_id)
            .limit(settings.batch_size)
            .with_for_update()
        )
    )
    if len(samples) < settings.batch_size:
        return False
    await _freeze(session, policy, head, samples)
    return True


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
    )
    session.add(batch)
    await session.flush()
    try:
        check_variance([sample.reward for sample in samples])
    except NoVariance as refusal:
        batch.state, batch.reason, batch.settled_at = BatchState.REFUSED, str(refusal), now()
        for sample in samples:
            sample.state, sample.reason, sample.batch_id = (
                SampleState.DROPPED,
                "its batch was refused",
                batch.id,
            )
        told = {"project_id": policy.project_id, "policy": policy.name}
        record(session, "assemble", "batch refused", batch.id, str(refusal), **told)
        nudge(session, "assemble")
        return
    for sample in samples:
        sample.state, sample.batch_id = SampleState.BATCHED, batch.id
    nudge(session, "train")
