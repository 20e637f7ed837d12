"""Jobs: the work is a row in the database, and a Celery message tells a worker to look there.

This module sends the messages. A lost message costs time, not work: the reconciler finds the row.
"""

import logging
import os
import queue
import socket
import threading
import time
import uuid
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

from celery import Celery
from celery.app.amqp import AMQP
from kombu import Connection as KombuConnection
from kombu import Exchange, Producer, Queue, transport
from kombu.transport import filesystem
from kombu.utils.encoding import str_to_bytes
from kombu.utils.json import dumps
from sqlalchemy.engine import Connection
from sqlalchemy.ext.asyncio import AsyncSession

TaskName = Literal["curate", "judge", "rollout", "assemble", "train", "evaluate", "publish", "webhook", "reconcile"]
log = logging.getLogger("attune.jobs")
QUEUES: dict[TaskName, str] = {
    "reconcile": "attune",  # workers of an earlier release consume this queue alone, and find all work by it
    "curate": "curate",
    "assemble": "assemble",
    "judge": "judge",
    "webhook": "webhook",
    "rollout": "rollout",
    "train": "train",
    "evaluate": "publish",
    "publish": "publish",
}
FURTHER_QUEUES = {"attune": ("curate", "assemble"), "judge": ("webhook",)}  # of a worker of this queue
PENDING_TASKS = "attune_pending_tasks"  # a key of a session's or connection's `info`
SEND_INTERVAL_SECONDS = 0.02  # between two messages of the same task
EMBEDDED_SCHEME = "attune-folder"
MAX_QUEUED = 50  # messages that wait in one queue: each says the same as the others
EXPIRES_SECONDS = 7200  # compared with the worker's clock, which may be an hour off
RETRY_INTERVALS = {"interval_start": 0.5, "interval_step": 0.5, "interval_max": 4.0}  # seconds
# A Redis host that has vanished is noticed like a database host; one that does not answer is given up after 10 s.
REDIS_OPTIONS = {
    "socket_connect_timeout": 3.0,
    "socket_timeout": 10.0,
    "socket_keepalive": True,
    "socket_keepalive_options": {socket.TCP_KEEPIDLE: 5, socket.TCP_KEEPINTVL: 2, socket.TCP_KEEPCNT: 3},
}
transport.TRANSPORT_ALIASES[EMBEDDED_SCHEME] = f"{__name__}:Transport"


def enqueue_after_commit(session: AsyncSession | Connection, *tasks: TaskName) -> None:
    """Send these tasks once this transaction has committed; drop them if it rolls back."""
    session.info.setdefault(PENDING_TASKS, []).extend(tasks)


class TaskSender:
    """Sends tasks from a thread of its own, so that a broker that is down or slow never delays a request.

    A task that waits to be sent is not queued twice, and two messages of one task are some time apart: a thousand votes
    a second are fifty messages.
    """

    def __init__(self, celery: Celery) -> None:
        self._celery = celery
        self._waiting: set[str] = set()
        self._queue: queue.SimpleQueue[TaskName | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="task-sender", daemon=True)
        self._thread.start()

    def enqueue(self, tasks: Iterable[TaskName]) -> None:
        for task in dict.fromkeys(tasks):
            if task not in self._waiting:
                self._waiting.add(task)
                self._queue.put(task)

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join(timeout=2)

    def _run(self) -> None:
        sent_at: dict[str, float] = {}
        while (task := self._queue.get()) is not None:
            time.sleep(max(0.0, sent_at.get(task, 0.0) + SEND_INTERVAL_SECONDS - time.monotonic()))
            self._waiting.discard(task)
            sent_at[task] = time.monotonic()
            try:
                self._celery.send_task(
                    f"attune.{task}", queue=queue_name(task), ignore_result=True, expires=EXPIRES_SECONDS
                )
            except Exception as error:  # a broker's library may raise anything, and this thread must go on
                log.warning("could not send task %s (%s); the reconciler will find the work", task, error)


def queue_name(task: TaskName) -> str:
    """Return the queue of a task.

    Releases have a queue of their own, so that they never wait behind feedback. So have judges and rollouts, which are
    slow, so that nothing waits behind them. Curation has messages as fast as votes come, and judges as fast as replies:
    neither updates and the reconciler nor webhooks, which the same workers do, wait behind these.
    """
    return QUEUES[task]


def consumed_queues(names: Iterable[str]) -> list[str]:
    """Return the queues that a worker consumes, in turn, for these names of `attune worker --queue`.

    Example: consumed_queues(["attune", "judge"]) is ["attune", "curate", "assemble", "judge", "webhook"]
    """
    return [queue for name in names for queue in (name, *FURTHER_QUEUES.get(name, ()))]


class BrokerConnection(KombuConnection):  # type: ignore[misc]
    """A connection that retries more often than Kombu's.

    Kombu's pauses between attempts grow by 2 s up to 30 s, so a broker that is back could stay unnoticed for as long.
    Neither Celery nor a setting changes that.
    """

    def _ensure_connection(
        self, errback: object = None, max_retries: int | None = None, *args: object, **options: object
    ) -> object:
        if not args:
            options = RETRY_INTERVALS | {name: value for name, value in options.items() if value is not None}
        return super()._ensure_connection(errback, max_retries, *args, **options)


class RetryingAMQP(AMQP):  # type: ignore[misc]
    Connection = BrokerConnection


class Channel(filesystem.Channel):  # type: ignore[misc]
    """Kombu's file-system channel, except that messages appear whole or not at all.

    Kombu creates the file of a message and then writes it. A reader that polls in between takes an empty message, and
    its worker fails.
    """

    def _put(self, queue: str, payload: object, **options: object) -> None:
        folder = Path(self.data_folder_out)
        name = f"{time.time_ns()}_{uuid.uuid4()}.{queue}"
        (folder / f"{name}.new").write_bytes(str_to_bytes(dumps(payload)))
        os.rename(folder / f"{name}.new", folder / f"{name}.msg")


class Transport(filesystem.Transport):  # type: ignore[misc]
    """The embedded broker."""

    Channel = Channel


class JobCelery(Celery):  # type: ignore[misc]  # Celery has no types
    """Celery that sends no message to a queue in which enough of them wait: more would only be read and dropped.

    Where votes come faster than curation takes its messages, or nobody consumes a queue, it would grow without end.
    """

    def send_task(
        self, name: str, *args: object, queue: str, producer: Producer | None = None, **options: object
    ) -> object:
        with self.producer_or_acquire(producer) as acquired:
            if self._count_waiting(acquired, queue) >= MAX_QUEUED:
                return None
            return super().send_task(name, *args, queue=queue, producer=acquired, **options)

    def _count_waiting(self, producer: Producer, queue: str) -> int:
        """Return how many messages wait; 0 where that cannot be said, since sending connects again by itself."""
        try:
            if not producer.connection.connected:
                return 0
            return int(self.amqp.queues[queue].queue_declare(channel=producer.channel).message_count)
        except Exception as error:  # a broker's library may raise anything
            log.debug("the messages in %s could not be counted: %s", queue, error)
            return 0


def make_celery(broker_url: str | None, broker_dir: Path) -> Celery:
    """Return the Celery application, the same for senders and for workers."""
    celery = JobCelery("attune", amqp=RetryingAMQP)
    options: dict[str, object] = REDIS_OPTIONS if broker_url is not None and broker_url.startswith("redis") else {}
    if broker_url is None:
        broker_dir.mkdir(parents=True, exist_ok=True)
        folder = str(broker_dir)
        options = {
            "data_folder_in": folder,
            "data_folder_out": folder,
            "control_folder": f"{folder}/control",
            "polling_interval": 0.02,  # kombu's default of 1 s would be most of a release
        }
    is_amqp = broker_url is not None and broker_url.startswith("amqp")
    celery.conf.update(
        broker_url=broker_url or f"{EMBEDDED_SCHEME}://",
        broker_transport_options=options,
        broker_connection_retry_on_startup=True,
        broker_connection_max_retries=None,  # an outage may last long
        task_ignore_result=True,
        task_default_queue="attune",
        # Where messages are acknowledged and the connection breaks meanwhile, Kombu's channel for Redis counts the
        # message as under way for ever, and takes no other. A lost message costs time, not work.
        task_queues=[
            Queue(name, Exchange(name), routing_key=name, no_ack=not is_amqp) for name in dict.fromkeys(QUEUES.values())
        ],
        worker_hijack_root_logger=False,
        worker_enable_remote_control=False,
        worker_prefetch_multiplier=1,
        task_publish_retry_policy={"max_retries": 1, "interval_start": 0.1},
    )
    return celery
