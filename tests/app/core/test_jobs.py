"""Jobs: tasks are sent after the commit, never after a rollback, and never delay a request."""

import threading
import time
from collections.abc import Iterable
from pathlib import Path

import pytest
from kombu import Connection, Queue

from app.core.database import Database
from app.core.jobs import EMBEDDED_SCHEME, TaskName, TaskSender, enqueue_after_commit, make_celery


class RecordingSender:
    def __init__(self) -> None:
        self.enqueued: list[TaskName] = []

    def enqueue(self, tasks: Iterable[TaskName]) -> None:
        self.enqueued += tasks


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "broker"
    path.mkdir()
    return path


def connection(folder: Path) -> Connection:
    options = {"data_folder_in": str(folder), "data_folder_out": str(folder), "control_folder": str(folder / "control")}
    return Connection(f"{EMBEDDED_SCHEME}://", transport_options=options)


async def test_tasks_are_sent_after_the_commit_and_dropped_on_rollback(database_url: str) -> None:
    sender = RecordingSender()
    db = Database(database_url, sender)  # type: ignore[arg-type]
    async with db.write() as session:
        enqueue_after_commit(session, "curate")
        assert sender.enqueued == []
    assert sender.enqueued == ["curate"]
    with pytest.raises(RuntimeError):
        async with db.write() as session:
            enqueue_after_commit(session, "assemble")
            raise RuntimeError("the request failed")
    assert sender.enqueued == ["curate"]
    await db.close()


def test_hanging_broker_does_not_delay_a_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task_sender = TaskSender(celery := make_celery("redis://127.0.0.1:1/0", tmp_path))
    released, called = threading.Event(), threading.Event()

    def send(*args: object, **options: object) -> None:
        called.set()
        assert released.wait(60)

    monkeypatch.setattr(celery, "send_task", send)
    task_sender.enqueue(["curate", "train"] * 50)  # it only queues; the thread waits
    assert called.wait(60)
    task_sender.enqueue(["curate", "train"] * 50)
    assert not released.is_set()
    released.set()
    task_sender.close()


def test_embedded_broker_writes_message_files_atomically(folder: Path) -> None:
    """Kombu's own transport lets a reader take a file before it is written, and the worker fails."""
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


def test_unread_queue_does_not_fill_the_disk(folder: Path) -> None:
    with connection(folder) as sender:
        producer = sender.Producer()
        for number in range(200):
            producer.publish({"number": number}, routing_key="q", declare=[Queue("q")])
    assert 10 <= len(list(folder.glob("*.msg"))) <= 50
