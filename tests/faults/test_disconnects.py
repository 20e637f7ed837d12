"""Clients hang up at random moments: the engine stops, the turn is on record with its reason, nothing is left over."""

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
from tests.support.processes import processes, until
from tests.support.scripted_engine import ScriptedEngine, serve

FULL = os.environ.get("ATTUNE_FULL") == "1"
ROUND = 500 if FULL else 50  # there are two
AT_ONCE = 25
IDLE_SECONDS = 15.0  # after the client is gone, on a busy machine
LATEST = 2.5  # seconds; a whole reply would take twenty times that
SPARE = 5  # idle connections and the like that may come and go
pytestmark = [pytest.mark.timeout(900 if FULL else 400)]


@dataclass
class Clients:
    """They ask, and are gone. Each question carries its number, by which the engine's replies are told apart."""

    url: str
    key: str
    engine: ScriptedEngine
    gone_at: dict[str, float] = field(default_factory=dict)
    lateness: dict[str, float] = field(default_factory=dict)

    async def hang_up(self, count: int) -> None:
        free = asyncio.Semaphore(AT_ONCE)
        first = len(self.gone_at)
        async with asyncio.TaskGroup() as group:
            for number in range(first, first + count):
                group.create_task(self._one(f"question {number}", free))

    async def _one(self, question: str, free: asyncio.Semaphore) -> None:
        stream = random.random() < 0.5
        body = {"model": "shop", "messages": [{"role": "user", "content": question}], "stream": stream}
        request = post(self.url, "/v1/chat/completions", body, {"authorization": f"Bearer {self.key}"})
        async with free:
            connection = await HttpConnection.connect(self.url)
            with suppress(TimeoutError):
                async with asyncio.timeout(random.choice([0.0, 0.03] + [random.uniform(0, LATEST)] * 8)):
                    connection.send(request)
                    answer = await connection.request(b"")
                    raise AssertionError(f"a whole reply came: {answer.body[:200]!r}")
            connection.close(hard=random.random() < 0.5)
            self.gone_at[question] = time.monotonic()

    async def watch(self) -> None:
        """How long after its client each reply is still being made."""
        while True:
            at = time.monotonic()
            for reply in list(self.engine.running.values()):
                question = reply.body["messages"][-1]["content"]
                if question in self.gone_at:
                    self.lateness[question] = at - self.gone_at[question]
            await asyncio.sleep(0.02)

    async def ask_whole(self) -> None:
        """One short reply, heard to its end."""
        say, self.engine.reply_text = self.engine.reply_text, ""
        body = {"model": "shop", "messages": [{"role": "user", "content": "hi"}]}
        connection = await HttpConnection.connect(self.url)
        answer = await connection.request(
            post(self.url, "/v1/chat/completions", body, {"authorization": f"Bearer {self.key}"})
        )
        connection.close()
        assert answer.status == 200
        self.engine.reply_text = say

    async def idle(self) -> None:
        async def nothing_runs() -> bool:
            return not self.engine.running

        await until(nothing_runs, 30, "the engine is idle again")


@dataclass
class Watched:
    """The API, and the tasks that live on its event loop."""

    app: Any
    loop: asyncio.AbstractEventLoop | None = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.loop = asyncio.get_running_loop()
        await self.app(scope, receive, send)

    def tasks(self) -> Counter[str]:
        assert self.loop is not None
        return Counter(getattr(task.get_coro(), "__qualname__", "?") for task in asyncio.all_tasks(self.loop))


@pytest.fixture
def long_winded(scripted: ScriptedEngine) -> ScriptedEngine:
    """Fifty seconds a reply: were it not cut, it would outlast every bound of these tests."""
    scripted.reply_text, scripted.seconds_per_token = "word " * 500, 0.1
    return scripted


@pytest.fixture
def watched(harness: Harness) -> Iterator[tuple[str, Watched]]:
    watched = Watched(create_app(harness.settings))
    with serve(watched, lifespan="on") as url:
        yield url, watched


async def test_disconnected_replies_end_and_are_recorded(
    harness: Harness, long_winded: ScriptedEngine, watched: tuple[str, Watched]
) -> None:
    url, api = watched
    clients = Clients(url, harness.key, long_winded)
    before = api.tasks()
    watching = asyncio.create_task(clients.watch())
    for _ in range(2):
        await clients.hang_up(ROUND)
        await clients.idle()
    watching.cancel()

    await until(lambda: closed(harness), 60, "every turn is closed")
    turns = await harness.all(Turn)
    prompts = [body["messages"][-1]["content"] for body in long_winded.requests]
    asked = Counter(turn.messages[-1]["content"] for turn in turns)
    assert set(prompts) <= set(asked), "what the engine was asked is on record"
    assert len(turns) > len(clients.gone_at) / 4, "many of them were heard before they were gone"
    assert set(asked.values()) == {1} == set(Counter(prompts).values())
    assert {(turn.state, turn.finish_reason) for turn in turns} == {(TurnState.ABORTED, "client_disconnect")}
    late = sorted(clients.lateness.values(), reverse=True)[:5]
    print(f"\n{len(clients.gone_at)} hung up on {harness.db.engine.dialect.name}: {len(turns)} turns, latest {late} s")
    assert not late or late[0] <= IDLE_SECONDS

    async def no_task_left() -> bool:
        return not api.tasks() - before

    await until(no_task_left, 60, f"only the tasks of before are left, beside {api.tasks() - before}")


async def closed(harness: Harness) -> bool:
    return all(turn.state != TurnState.OPEN for turn in await harness.all(Turn))


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
@pytest.mark.slow
async def test_disconnects_leave_no_file_descriptor_open(harness: Harness, long_winded: ScriptedEngine) -> None:
    with processes(harness.settings) as running:
        running.start("api")
        process = running.children["api"].process
        assert process is not None
        descriptors = Path(f"/proc/{process.pid}/fd")
        clients = Clients(running.settings.url, harness.key, long_winded)
        counts = []
        for _ in range(2):  # the first round fills the pools, which stay
            await clients.hang_up(ROUND)
            await clients.idle()
            await until(lambda: closed(harness), 60, "every turn is closed")
            await asyncio.sleep(4)  # idle connections to the engine are dropped after three, at the next request
            await clients.ask_whole()
            counts.append(held(descriptors))
    first, second = (count.total() for count in counts)
    print(f"\n{2 * ROUND} hung up: {first} and {second} descriptors after each half")
    assert second <= first + SPARE, counts[1] - counts[0]
    said = running.children["api"].log.read_text()
    assert "Traceback" not in said, said[-3000:]


def held(descriptors: Path) -> Counter[str]:
    """By what they are: a file's name, or "socket"."""
    kinds: Counter[str] = Counter()
    for descriptor in descriptors.iterdir():
        with suppress(FileNotFoundError):
            kinds[descriptor.readlink().name.partition(":")[0]] += 1
    return kinds
