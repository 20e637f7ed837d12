"""Creates batches and versions as the assembler and the trainer do, and publishes versions."""

from typing import Any

from sqlalchemy import select

from app.deployments import service
from app.models import (
    Batch,
    BatchState,
    BatchTurn,
    Engine,
    Sample,
    SampleState,
    Turn,
    Version,
    VersionState,
    new_id,
)
from app.policies.locks import lock_policy
from app.policies.service import Attribution
from tests.support.deployment import Harness


async def create_batch(harness: Harness, *turns: Turn, **values: Any) -> Batch:
    """Create an open batch of these turns' samples; missing samples are created."""
    policy = await harness.policy()
    batch = Batch(
        **{
            "id": new_id("bat"),
            "policy_id": policy.id,
            "parent_id": policy.head_version_id,
            "num_samples": len(turns),
            "state": BatchState.OPEN,
            **values,
        }
    )
    async with harness.db.write() as session:
        session.add(batch)
        await session.flush()
        for turn in turns:
            sample = await session.get(Sample, turn.id)
            if sample is None:
                same = {"policy_id": turn.policy_id, "version_id": turn.version_id, "ready_at": 0.0}
                sample = Sample(turn_id=turn.id, reward=1.0, **same)
                session.add(sample)
            sample.state, sample.batch_id, sample.reason = SampleState.BATCHED, batch.id, None
            session.add(BatchTurn(batch_id=batch.id, turn_id=turn.id))
    return batch


async def create_version(
    harness: Harness, *turns: Turn, state: VersionState = VersionState.SUPERSEDED, number: int | None = None
) -> Version:
    """Create a version whose parent is the head, trained on these turns. By default its number is the parent's + 1."""
    batch = await create_batch(harness, *turns)
    values = {} if number is None else {"number": number, "adapter_name": f"shop-v{number}"}
    version = await harness.version(state, batch_id=batch.id, **values)
    async with harness.db.write() as session:
        row = await session.get_one(Batch, batch.id)
        row.state, row.version_id = BatchState.TRAINED, version.id
        for sample in await session.scalars(select(Sample).where(Sample.batch_id == batch.id)):
            sample.state = SampleState.TRAINED
    return version


async def publish(harness: Harness, *, loaded: bool = True) -> Version:
    """Create a version and make it live. Unless `loaded` is False, the engine engine-0 has loaded it."""
    version = await harness.version(VersionState.VERIFIED)
    async with harness.db.write() as session:
        locked = await lock_policy(session, version.policy_id)
        row = await session.get_one(Version, version.id)
        if loaded:
            assert row.adapter_name is not None
            engine = await session.get_one(Engine, "engine-0")
            engine.loaded = [*engine.loaded, row.adapter_name]
        await service.set_live(locked, row, Attribution("test", "test"))
    return version
