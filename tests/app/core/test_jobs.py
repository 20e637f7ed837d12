"""Jobs: tasks are sent after the commit, never after a rollback, and never delay a request."""

import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import pytest
from celery import Celery
from kombu import Connection, Message, Queue

from app.core.database import Database
from app.core.jobs import (
    EMBEDDED_SCHEME,
    MAX_QUEUED,
    TaskName,
    TaskSender,
    consumed_queues,
    enqueue_after_commit,
    make_celery,
    queue_name,
)
from tests.journeys.brokers import shared_rabbitmq, shared_redis


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


@pytest.fixture(params=["embedded", "redis", "rabbitmq"])
def broker(request: pytest.FixtureRequest) -> Iterator[str | None]:
    """Yield the URL of a broker whose queues are empty; None is the embedded one."""
    if request.param == "embedded":
        yield None
        return
    with shared_redis() if request.param == "redis" else shared_rabbitmq() as url:
        yield url


def count_messages(celery: Celery, queue: str) -> int:
    with celery.connection_for_write() as connection:
        return int(celery.amqp.queues[queue].queue_declare(channel=connection.default_channel).message_count)


def test_messages_that_nobody_reads_do_not_pile_up(broker: str | None, folder: Path) -> None:
    """Each says the same as the others, so a queue needs no more than a few."""
    celery = make_celery(broker, folder)
    for _ in range(3 * MAX_QUEUED):
        celery.send_task("attune.curate", queue="curate")
    assert MAX_QUEUED <= count_messages(celery, "curate") <= MAX_QUEUED + 1, "RabbitMQ counts a little late"
    celery.send_task("attune.assemble", queue="assemble")
    assert count_messages(celery, "assemble") == 1


def test_full_queue_takes_messages_again_once_they_are_read(folder: Path) -> None:
    celery = make_celery(None, folder)
    for _ in range(MAX_QUEUED + 1):
        celery.send_task("attune.curate", queue="curate")
    next(folder.glob("*.msg")).unlink()
    celery.send_task("attune.curate", queue="curate")
    assert count_messages(celery, "curate") == MAX_QUEUED


@pytest.mark.parametrize(
    ("worker", "many", "others"), [("attune", "curate", ("assemble", "reconcile")), ("judge", "judge", ("webhook",))]
)
def test_nothing_waits_behind_the_messages_of_a_busy_task(
    broker: str | None, folder: Path, worker: str, many: TaskName, others: Sequence[TaskName]
) -> None:
    """Votes may come faster than curation takes its messages. In one queue, updates and the reconciler would starve."""
    celery = make_celery(broker, folder)
    for task in (*[many] * MAX_QUEUED, *others):
        celery.send_task(f"attune.{task}", queue=queue_name(task))
    received: list[str] = []

    def receive(body: object, message: Message) -> None:
        received.append(message.headers["task"])
        message.ack()

    with celery.connection_for_read() as connection:
        queues = [celery.amqp.queues[name] for name in consumed_queues([worker])]
        with connection.Consumer(queues, callbacks=[receive], prefetch_count=1, accept=["json"]):
            while len(received) < 10:
                connection.drain_events(timeout=60)
    assert {f"attune.{task}" for task in others} < set(received)


def test_worker_of_several_queues_consumes_each_once() -> None:
    queues = consumed_queues(["judge", "attune"])
    assert len(set(queues)) == len(queues) == 5
