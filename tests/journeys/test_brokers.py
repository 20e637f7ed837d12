"""RabbitMQ and Redis: repeated messages, lost messages, and a broker that restarts."""

import asyncio
from collections import Counter
from pathlib import Path

import psutil
import pytest

from app.core.jobs import make_celery, queue_name
from app.core.settings import Settings
from app.models import Batch, BatchState, Sample, SampleState, Version
from tests.journeys.brokers import OwnRedis, shared_rabbitmq
from tests.support.deployment import Harness
from tests.support.frozen_batches import create_batch
from tests.support.processes import PATIENCE_SECONDS, Processes, processes, until

pytestmark = [
    pytest.mark.journey,
    pytest.mark.parametrize("database_url", ["sqlite"], indirect=True),
]
PROCESSES = ("worker", "trainer", "beat")


async def wait_until_trained(harness: Harness, batch_id: str) -> None:
    async def is_trained() -> bool:
        return bool((await harness.get(Batch, batch_id)).state == BatchState.TRAINED)

    await until(is_trained, PATIENCE_SECONDS, "the batch is trained")


def pids(running: Processes) -> dict[str, int]:
    """Return the process ids of all started processes, including torchrun's ranks."""
    ids = {}
    for name in PROCESSES:
        process = running.children[name].process
        assert process is not None and process.poll() is None, f"{name} has ended"
        ids[name] = process.pid
        ids |= {f"{name} {n}": child.pid for n, child in enumerate(psutil.Process(process.pid).children())}
    return ids


def settings_for(harness: Harness, broker_url: str) -> Settings:
    return harness.settings.replace(
        {
            "broker.url": broker_url,
            "workers.lease_seconds": 60.0,
            "workers.reconcile_seconds": 0.5,
            "trainer.batch_size": 96,
            "trainer.max_batch_size": 96,
        }
    )


@pytest.mark.slow
async def test_batch_enqueued_twenty_times_over_rabbitmq_is_applied_once(harness: Harness, tmp_path: Path) -> None:
    policy = (await harness.policy()).id
    with shared_rabbitmq() as url, processes(settings_for(harness, url)) as running:
        running.start(*PROCESSES)
        batch_id = await create_batch(harness.db, policy)
        celery = make_celery(url, tmp_path)
        for task in ("train", "assemble", "reconcile") * 20:
            celery.send_task(f"attune.{task}", queue=queue_name(task))
        await wait_until_trained(harness, batch_id)
        await wait_until_trained(harness, await create_batch(harness.db, policy, seed=1))
        celery.close()
    versions = [version for version in await harness.all(Version) if version.number]
    assert sorted(version.number for version in versions) == [1, 2]
    assert {batch.attempt for batch in await harness.all(Batch)} == {1}
    samples = await harness.all(Sample)
    assert {sample.state for sample in samples} == {SampleState.TRAINED}
    assert Counter(Counter(sample.batch_id for sample in samples).values()) == {8: 2}


@pytest.mark.slow
async def test_workers_reconnect_to_a_redis_that_comes_back_empty(harness: Harness, tmp_path: Path) -> None:
    policy = (await harness.policy()).id
    redis = OwnRedis(tmp_path)
    redis.start()
    try:
        with processes(settings_for(harness, redis.url)) as running:
            running.start(*PROCESSES)
            for seed in range(2):  # the trainer may find the first batch when it starts; the second one needs a message
                await wait_until_trained(harness, await create_batch(harness.db, policy, seed=seed))
            before = pids(running)
            redis.kill()
            await asyncio.sleep(3)  # by then the earlier messages are consumed
            batch_id = await create_batch(harness.db, policy, seed=2)
            await asyncio.sleep(3)
            assert (await harness.get(Batch, batch_id)).state == BatchState.OPEN, "no message could be sent"
            redis.start()
            await wait_until_trained(harness, batch_id)
            assert pids(running) == before, "no process was restarted"
    finally:
        redis.kill()
    assert [version.number for version in await harness.all(Version) if version.number] == [1, 2, 3]
