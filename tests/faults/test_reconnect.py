"""Workers reconnect soon after a long broker outage: the retry delay stays below a few seconds."""

import asyncio
import re
import shutil
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from app.core.jobs import TaskSender, make_celery
from app.core.processes import die_with_parent
from app.models import Feedback
from tests.conftest import missing
from tests.support.deployment import Harness
from tests.support.engine_fixture import free_port
from tests.support.processes import processes

AWAY_SECONDS = 15.0  # kombu's own pauses would have come to 8 s by then, and to 30 s later
PAUSE_SECONDS = 4.0  # ours at most
BACK_SECONDS = 60.0  # of which a busy machine may take the most
pytestmark = [
    pytest.mark.timeout(400),
    pytest.mark.parametrize("database_url", ["sqlite"], indirect=True),
]


class Redis:
    def __init__(self, folder: Path) -> None:
        self.folder, self.port = folder, free_port()
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self) -> None:
        told = ["--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--dir", str(self.folder)]
        self.process = subprocess.Popen(
            ["redis-server", *told], stdout=subprocess.DEVNULL, start_new_session=True, preexec_fn=die_with_parent
        )

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[Redis]:
    if shutil.which("redis-server") is None:
        missing("no Redis to start")
    redis = Redis(tmp_path)
    redis.start()
    yield redis
    redis.kill()


@dataclass
class Thumbs:
    """One after the other, each with a ring every half second until it has been looked at."""

    harness: Harness
    task_sender: TaskSender
    turn_id: str
    log: Path  # the worker's

    async def give(self, name: str) -> None:
        assert (await self.harness.thumb(self.turn_id, id=name)).status_code == 201
        self.task_sender.enqueue(["curate"])

    async def processed(self, name: str) -> float:
        """Seconds until it has been looked at."""
        await self.give(name)
        began = time.monotonic()
        while True:
            self.task_sender.enqueue(["curate"])
            await asyncio.sleep(0.5)
            if all(row.processed for row in await self.harness.all(Feedback)):
                return time.monotonic() - began
            assert time.monotonic() - began < BACK_SECONDS


@pytest.fixture
async def thumbs(harness: Harness, redis: Redis, tmp_path: Path) -> AsyncIterator[Thumbs]:
    """A worker answers them, once it has looked at the first."""
    task_sender = TaskSender(make_celery(redis.url, tmp_path))
    with processes(harness.settings.model_copy(update={"broker_url": redis.url})) as running:
        thumbs = Thumbs(harness, task_sender, (await harness.turn()).id, running.children["worker"].log)
        running.start("worker")
        await thumbs.processed("before")
        yield thumbs
    task_sender.close()


@pytest.mark.slow
async def test_worker_reconnects_within_seconds_after_a_long_outage(thumbs: Thumbs, redis: Redis) -> None:
    redis.kill()
    await asyncio.sleep(AWAY_SECONDS)
    redis.start()
    seconds = await thumbs.processed("after")
    print(f"\nback {seconds:.1f} s after a broker that was away for {AWAY_SECONDS:.0f} s")
    pauses = [float(told) for told in re.findall(r"Trying again in ([\d.]+) seconds", thumbs.log.read_text())]
    assert len(pauses) > 2 and 1.0 < max(pauses) <= PAUSE_SECONDS, pauses


@pytest.mark.slow
async def test_worker_reconnects_after_an_outage_under_load(thumbs: Thumbs, redis: Redis) -> None:
    """Some message has just been read then, and cannot be acknowledged: that must not be the last that the worker hears
    of its broker."""

    async def send_messages() -> None:
        while True:
            thumbs.task_sender.enqueue(["reconcile", "assemble", "curate"])
            await asyncio.sleep(0.005)

    sending = asyncio.create_task(send_messages())
    for number in range(3):
        await asyncio.sleep(1.0)
        redis.kill()
        await asyncio.sleep(1.5)
        redis.start()
        await thumbs.processed(f"after {number}")
    sending.cancel()
