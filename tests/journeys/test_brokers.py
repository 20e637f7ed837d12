"""Brokers that are not the embedded one: they ring too often, they forget, they go away and come back."""

import asyncio
from collections import Counter
from pathlib import Path

import psutil
import pytest

from app.core.jobs import make_celery, queue_of
from app.core.settings import Settings
from app.models import Batch, BatchState, Sample, SampleState, Version
from tests.journeys.brokers import OwnRedis, shared_rabbitmq
from tests.support.deployment import Ring
from tests.support.frozen_batches import freeze
from tests.support.processes import Processes, processes, until

pytestmark = [
    pytest.mark.journey,
    pytest.mark.parametrize("database_url", ["sqlite"], indirect=True),
]
PROCESSES = ("worker", "trainer", "beat")


async def trained(ring: Ring, batch_id: str) -> None:
    async def done() -> bool:
        return bool((await ring.get(Batch, batch_id)).state == BatchState.TRAINED)

    await until(done, 180, "the batch is trained")


def pids(running: Processes) -> dict[str, int]:
    """Of all that was started, torchrun's ranks included."""
    found = {}
    for name in PROCESSES:
        process = running.children[name].process
        assert process is not None and process.poll() is None, f"{name} has ended"
        found[name] = process.pid
        found |= {f"{name} {n}": child.pid for n, child in enumerate(psutil.Process(process.pid).children())}
    return found


def settings_for(ring: Ring, broker_url: str) -> Settings:
    return ring.settings.model_copy(
        update={"broker_url": broker_url, "lease_seconds": 60.0, "sweep_seconds": 0.5, "batch_size": 96}
    )


async def test_over_rabbitmq_a_batch_that_is_rung_for_twenty_times_is_applied_once(ring: Ring, tmp_path: Path) -> None:
    policy = (await ring.policy()).id
    with shared_rabbitmq() as url, processes(settings_for(ring, url)) as running:
        running.start(*PROCESSES)
        batch_id = await freeze(ring.db, policy)
        celery = make_celery(url, tmp_path)
        for station in ("train", "assemble", "sweep") * 20:
            celery.send_task(f"attune.{station}", queue=queue_of(station))  # type: ignore[arg-type]
        await trained(ring, batch_id)
        await trained(ring, await freeze(ring.db, policy, seed=1))
        celery.close()
    versions = [version for version in await ring.all(Version) if version.number]
    assert sorted(version.number for version in versions) == [1, 2]
    assert {batch.attempt for batch in await ring.all(Batch)} == {1}
    samples = await ring.all(Sample)
    assert {sample.state for sample in samples} == {SampleState.TRAINED}
    assert Counter(Counter(sample.batch_id for sample in samples).values()) == {8: 2}


async def test_a_redis_that_was_killed_and_comes_back_empty_is_found_again(ring: Ring, tmp_path: Path) -> None:
    policy = (await ring.policy()).id
    redis = OwnRedis(tmp_path)
    redis.start()
    try:
        with processes(settings_for(ring, redis.url)) as running:
            running.start(*PROCESSES)
            for seed in range(2):  # the first may be found at the trainer's start; the second is rung for
                await trained(ring, await freeze(ring.db, policy, seed=seed))
            before = pids(running)
            redis.kill()
            await asyncio.sleep(3)  # what had been rung before is answered
            meanwhile = await freeze(ring.db, policy, seed=2)
            await asyncio.sleep(3)
            assert (await ring.get(Batch, meanwhile)).state == BatchState.OPEN, "nobody could ring for it"
            redis.start()
            await trained(ring, meanwhile)
            assert pids(running) == before, "nobody had to be started again"
    finally:
        redis.kill()
    assert [version.number for version in await ring.all(Version) if version.number] == [1, 2, 3]
