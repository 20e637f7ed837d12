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
from tests.conftest import skip_or_fail
from tests.support.deployment import Harness
from tests.support.engine_fixture import free_port
from tests.support.processes import processes

OUTAGE_SECONDS = 15.0  # by then Kombu's default pauses have grown to 8 s, and later to 30 s
MAX_PAUSE_SECONDS = 4.0  # between Attune's attempts to connect
RECOVERY_SECONDS = 60.0  # much longer than needed, for loaded machines
pytestmark = [
    pytest.mark.timeout(400),
    pytest.mark.parametrize("database_url", ["sqlite"], indirect=True),
]


class Redis:
    """A private Redis, which can be killed."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.port = folder, free_port()
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self) -> None:
        options = ["--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--dir", str(self.folder)]
        self.process = subprocess.Popen(
            ["redis-server", *options], stdout=subprocess.DEVNULL, start_new_session=True, preexec_fn=die_with_parent
        )

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[Redis]:
    if shutil.which("redis-server") is None:
        skip_or_fail("no Redis to start")
    redis = Redis(tmp_path)
    redis.start()
    yield redis
    redis.kill()


@dataclass
class FeedbackSender:
    """Sends feedback, and enqueues its processing twice a second until it is processed."""

    harness: Harness
    task_sender: TaskSender
    turn_id: str
    log: Path  # the worker's

    async def send(self, id: str) -> None:
        assert (await self.harness.vote(self.turn_id, id=id)).status_code == 201
        self.task_sender.enqueue(["curate"])

    async def wait_until_processed(self, id: str) -> float:
        """Send feedback. Return the seconds until it is processed."""
        await self.send(id)
        began = time.monotonic()
        try:
            async with asyncio.timeout(RECOVERY_SECONDS):
                while not all(row.processed for row in await self.harness.all(Feedback)):
                    self.task_sender.enqueue(["curate"])
                    await asyncio.sleep(0.5)
        except TimeoutError:
            pytest.fail(f"the worker does not recover; its log:\n{self.log.read_text()[-20_000:]}")
        return time.monotonic() - began


@pytest.fixture
async def sender(harness: Harness, redis: Redis, tmp_path: Path) -> AsyncIterator[FeedbackSender]:
    """A sender and a running worker, which has processed the first feedback."""
    task_sender = TaskSender(make_celery(redis.url, tmp_path))
    with processes(harness.settings.replace({"broker.url": redis.url})) as running:
        sender = FeedbackSender(harness, task_sender, (await harness.turn()).id, running.children["worker"].log)
        running.start("worker")
        await sender.wait_until_processed("before")
        yield sender
    task_sender.close()


@pytest.mark.slow
async def test_worker_reconnects_within_seconds_after_a_long_outage(sender: FeedbackSender, redis: Redis) -> None:
    redis.kill()
    await asyncio.sleep(OUTAGE_SECONDS)
    redis.start()
    seconds = await sender.wait_until_processed("after")
    print(f"\nrecovered {seconds:.1f} s after a broker outage of {OUTAGE_SECONDS:.0f} s")
    pauses = [float(seconds) for seconds in re.findall(r"Trying again in ([\d.]+) seconds", sender.log.read_text())]
    assert len(pauses) > 2 and 1.0 < max(pauses) <= MAX_PAUSE_SECONDS, pauses


@pytest.mark.slow
async def test_worker_reconnects_after_an_outage_under_load(sender: FeedbackSender, redis: Redis) -> None:
    """The worker cannot acknowledge a message that it read before the outage, and must consume messages again later."""

    async def send_messages() -> None:
        while True:
            sender.task_sender.enqueue(["reconcile", "assemble", "curate"])
            await asyncio.sleep(0.005)

    sending = asyncio.create_task(send_messages())
    for number in range(3):
        await asyncio.sleep(1.0)
        redis.kill()
        await asyncio.sleep(1.5)
        redis.start()
        await sender.wait_until_processed(f"after {number}")
    sending.cancel()
