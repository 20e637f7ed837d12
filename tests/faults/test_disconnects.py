"""Clients disconnect at random moments: the engine stops, the turn is stored with its reason, and nothing leaks."""

import asyncio
import os
import random
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from app.main import create_app
from app.models import Turn, TurnState
from tests.benchmarks.http_client import HttpConnection, post
from tests.support.deployment import Harness
from tests.support.processes import PATIENCE_SECONDS, processes, until
from tests.support.scripted_engine import ScriptedEngine, serve

FULL = os.environ.get("ATTUNE_FULL") == "1"
CLIENTS_PER_ROUND = 500 if FULL else 50  # there are two rounds
CONCURRENCY = 25
MAX_CONNECTED_SECONDS = 2.5  # no reply is complete by then
IDLE_SECONDS = 180.0  # until the engine stops; a reply that nothing stops takes longer
DESCRIPTOR_MARGIN = 5  # for example idle connections
pytestmark = [pytest.mark.timeout(900 if FULL else 400)]


@dataclass
class Clients:
    """Clients that send a question and disconnect. Each question has a number, which identifies the engine's reply."""

    url: str
    key: str
    engine: ScriptedEngine
    disconnected_at: dict[str, float] = field(default_factory=dict)
    abort_seconds: dict[str, float] = field(default_factory=dict)  # from the disconnect until the engine stopped

    async def disconnect(self, count: int) -> None:
        semaphore = asyncio.Semaphore(CONCURRENCY)
        first = len(self.disconnected_at)
        async with asyncio.TaskGroup() as group:
            for number in range(first, first + count):
                group.create_task(self._ask_and_disconnect(f"question {number}", semaphore))

    async def _ask_and_disconnect(self, question: str, semaphore: asyncio.Semaphore) -> None:
        stream = random.random() < 0.5
        body = {
            "model": "shop",
            "messages": [{"role": "user", "content": question}],
            "stream": stream,
            "max_tokens": 8000,
        }
        request = post(self.url, "/v1/chat/completions", body, {"authorization": f"Bearer {self.key}"})
        async with semaphore:
            connection = await HttpConnection.connect(self.url)
            with suppress(TimeoutError):
                async with asyncio.timeout(random.choice([0.0, 0.03] + [random.uniform(0, MAX_CONNECTED_SECONDS)] * 8)):
                    connection.send(request)
                    answer = await connection.request(b"")
                    raise AssertionError(f"received a complete reply: {answer.body[:200]!r}")
            connection.close(hard=random.random() < 0.5)
            self.disconnected_at[question] = time.monotonic()

    async def monitor(self) -> None:
        """Record how long the engine generates each reply after its client has disconnected."""
        while True:
            at = time.monotonic()
            for reply in list(self.engine.running.values()):
                question = reply.body["messages"][-1]["content"]
                if question in self.disconnected_at:
                    self.abort_seconds[question] = at - self.disconnected_at[question]
            await asyncio.sleep(0.02)

    async def complete_one(self) -> None:
        """Get one short reply completely."""
        long_text, self.engine.reply_text = self.engine.reply_text, ""
        body = {"model": "shop", "messages": [{"role": "user", "content": "hi"}]}
        connection = await HttpConnection.connect(self.url)
        answer = await connection.request(
            post(self.url, "/v1/chat/completions", body, {"authorization": f"Bearer {self.key}"})
        )
        connection.close()
        assert answer.status == 200
        self.engine.reply_text = long_text

    async def wait_until_idle(self) -> None:
        async def is_idle() -> bool:
            return not self.engine.running

        await until(is_idle, IDLE_SECONDS, "the engine is idle again")


@dataclass
class MonitoredApp:
    """The API; the tasks of its event loop can be counted."""

    app: Any
    loop: asyncio.AbstractEventLoop | None = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.loop = asyncio.get_running_loop()
        await self.app(scope, receive, send)

    def tasks(self) -> Counter[str]:
        assert self.loop is not None
        return Counter(getattr(task.get_coro(), "__qualname__", "?") for task in asyncio.all_tasks(self.loop))


@pytest.fixture
def slow_engine(scripted: ScriptedEngine, monkeypatch: pytest.MonkeyPatch) -> ScriptedEngine:
    """An engine that takes thirteen minutes per reply, longer than any limit of these tests."""
    for limit in ("sglang.client.PROBE_SECONDS", "stream.ABORT_TIMEOUT_SECONDS"):
        monkeypatch.setattr(f"app.inference.{limit}", 60.0)  # of this process: on a busy machine no abort is given up
    scripted.reply_text, scripted.seconds_per_token = "word " * 9000, 0.1
    return scripted


@pytest.fixture
def monitored(harness: Harness) -> Iterator[tuple[str, MonitoredApp]]:
    app = MonitoredApp(create_app(harness.settings))
    with serve(app, lifespan="on") as url:
        yield url, app


async def test_disconnected_replies_end_and_are_recorded(
    harness: Harness, slow_engine: ScriptedEngine, monitored: tuple[str, MonitoredApp]
) -> None:
    url, app = monitored
    clients = Clients(url, harness.key, slow_engine)
    tasks_before = app.tasks()
    monitoring = asyncio.create_task(clients.monitor())
    for _ in range(2):
        await clients.disconnect(CLIENTS_PER_ROUND)
        await clients.wait_until_idle()
    monitoring.cancel()

    await until(lambda: has_no_open_turn(harness), PATIENCE_SECONDS, "every turn is closed")
    turns = await harness.all(Turn)
    prompts = [body["messages"][-1]["content"] for body in slow_engine.requests]
    stored = Counter(turn.own_messages[-1]["content"] for turn in turns)
    assert set(prompts) <= set(stored), "every request to the engine is stored"
    assert len(turns) > len(clients.disconnected_at) / 4, "many clients disconnected after their request was accepted"
    assert set(stored.values()) == {1} == set(Counter(prompts).values())
    assert {(turn.state, turn.finish_reason) for turn in turns} == {(TurnState.ABORTED, "client_disconnect")}
    slowest = sorted(clients.abort_seconds.values(), reverse=True)[:5]
    print(f"\n{len(clients.disconnected_at)} disconnected on {harness.db.engine.dialect.name}: {len(turns)} turns")
    print(f"slowest aborts: {slowest} s")

    async def has_no_new_task() -> bool:
        return not app.tasks() - tasks_before

    await until(has_no_new_task, PATIENCE_SECONDS, f"the tasks have ended: {app.tasks() - tasks_before}")


async def has_no_open_turn(harness: Harness) -> bool:
    return all(turn.state != TurnState.OPEN for turn in await harness.all(Turn))


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
@pytest.mark.slow
async def test_disconnects_leave_no_file_descriptor_open(harness: Harness, slow_engine: ScriptedEngine) -> None:
    with processes(harness.settings) as running:
        running.start("api")
        process = running.children["api"].process
        assert process is not None
        descriptors = Path(f"/proc/{process.pid}/fd")
        clients = Clients(running.settings.local_url, harness.key, slow_engine)
        counts = []
        for _ in range(2):  # the first round fills the connection pools
            await clients.disconnect(CLIENTS_PER_ROUND)
            await clients.wait_until_idle()
            await until(lambda: has_no_open_turn(harness), PATIENCE_SECONDS, "every turn is closed")
            await asyncio.sleep(4)  # the next request closes connections to the engine that were idle for three seconds
            await clients.complete_one()
            counts.append(count_descriptors(descriptors))
    first, second = (count.total() for count in counts)
    print(f"\n{2 * CLIENTS_PER_ROUND} disconnects: {first} and {second} descriptors after each half")
    assert second <= first + DESCRIPTOR_MARGIN, counts[1] - counts[0]
    log = running.children["api"].log.read_text()
    assert "Traceback" not in log, log[-3000:]


def count_descriptors(descriptors: Path) -> Counter[str]:
    """Count the open descriptors by kind: a file's name, or "socket"."""
    kinds: Counter[str] = Counter()
    for descriptor in descriptors.iterdir():
        with suppress(FileNotFoundError):
            kinds[descriptor.readlink().name.partition(":")[0]] += 1
    return kinds
