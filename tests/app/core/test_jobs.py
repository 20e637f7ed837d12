"""Nudges: after the commit, never after a rollback, never at a request's cost."""

import threading
import time
from collections.abc import Iterable
from pathlib import Path

import pytest
from kombu import Connection, Queue

from app.core.database import Database
from app.core.jobs import SCHEME, TaskName, TaskSender, enqueue_after_commit, make_celery


class Notes:
    def __init__(self) -> None:
        self.rung: list[TaskName] = []

    def enqueue(self, stations: Iterable[TaskName]) -> None:
        self.rung += stations


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "bell"
    path.mkdir()
    return path


def connection(folder: Path) -> Connection:
    options = {"data_folder_in": str(folder), "data_folder_out": str(folder), "control_folder": str(folder / "control")}
    return Connection(f"{SCHEME}://", transport_options=options)


async def test_a_nudge_rings_after_the_commit_and_is_forgotten_on_rollback(database_url: str) -> None:
    notes = Notes()
    db = Database(database_url, notes)  # type: ignore[arg-type]
    async with db.write() as session:
        enqueue_after_commit(session, "curate")
        assert notes.rung == []
    assert notes.rung == ["curate"]
    with pytest.raises(RuntimeError):
        async with db.write() as session:
            enqueue_after_commit(session, "assemble")
            raise RuntimeError("the request failed")
    assert notes.rung == ["curate"]
    await db.close()


def test_a_broker_that_hangs_costs_a_request_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bell = TaskSender(celery := make_celery("redis://127.0.0.1:1/0", tmp_path))
    over, asked = threading.Event(), threading.Event()

    def send(*args: object, **options: object) -> None:
        asked.set()
        assert over.wait(60)

    monkeypatch.setattr(celery, "send_task", send)
    bell.enqueue(["curate", "train"] * 50)  # it only queues; the thread waits
    assert asked.wait(60)
    bell.enqueue(["curate", "train"] * 50)
    assert not over.is_set()
    over.set()
    bell.close()


def test_messages_of_the_embedded_broker_appear_whole(folder: Path) -> None:
    """Kombu's own transport lets a reader take a file before it is written; a worker dies of that."""
    messages = 300

    def write() -> None:
        with connection(folder) as sender:
            producer, sent = sender.Producer(), 0
            while sent < messages:
                if len(list(folder.glob("*.msg"))) < 20:
                    producer.publish({"number": sent}, routing_key="q", declare=[Queue("q")])
                    sent += 1

    numbers: list[int] = []
    with connection(folder) as receiver:
        queue = Queue("q")(receiver.default_channel)
        queue.declare()
        writer = threading.Thread(target=write)
        writer.start()
        ends = time.monotonic() + 120
        while len(numbers) < messages and time.monotonic() < ends:
            if (message := queue.get(no_ack=True)) is not None:
                numbers.append(message.payload["number"])
        writer.join()
    assert sorted(numbers) == list(range(messages))


def test_a_bell_that_nobody_answers_does_not_fill_the_disk(folder: Path) -> None:
    with connection(folder) as sender:
        producer = sender.Producer()
        for number in range(200):
            producer.publish({"number": number}, routing_key="q", declare=[Queue("q")])
    assert 10 <= len(list(folder.glob("*.msg"))) <= 50
