"""Jobs: rows are truth, messages are nudges. This is the sending half: a nudge says "look at the database"."""

import logging
import queue
import socket
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

from celery import Celery
from celery.app.amqp import AMQP
from kombu import Connection as KombuConnection
from kombu import transport
from sqlalchemy.engine import Connection
from sqlalchemy.ext.asyncio import AsyncSession

TaskName = Literal["curate", "judge", "rollout", "assemble", "train", "evaluate", "publish", "reconcile"]
log = logging.getLogger("attune.jobs")
PENDING_TASKS = "attune_nudges"
PAUSE_SECONDS = 0.02
SCHEME = "attune-folder"
EXPIRES_SECONDS = 7200  # read by the worker's clock, which may be an hour off
# Of Redis: a host that vanished without a word is given up as the database's is, and one that is silent in an answer.
REDIS = {
    "socket_connect_timeout": 3.0,
    "socket_timeout": 10.0,
    "socket_keepalive": True,
    "socket_keepalive_options": {socket.TCP_KEEPIDLE: 5, socket.TCP_KEEPINTVL: 2, socket.TCP_KEEPCNT: 3},
}
transport.TRANSPORT_ALIASES[SCHEME] = "app.core.broker:Transport"


def enqueue_after_commit(session: AsyncSession | Connection, *stations: TaskName) -> None:
    """Ring these stations once this transaction has committed; never if it rolls back."""
    session.info.setdefault(PENDING_TASKS, []).extend(stations)


class TaskSender:
    """Sends nudges from a thread of its own: a broker that is down or slow never delays a request.

    A station that is already waiting to be rung is not queued twice, and one that has just been rung waits a moment:
    a thousand thumbs a second are fifty messages. A lost nudge costs time, not work: the sweep
    finds the row.
    """

    def __init__(self, celery: Celery) -> None:
        self._celery = celery
        self._waiting: set[str] = set()
        self._queue: queue.SimpleQueue[TaskName | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="bell", daemon=True)
        self._thread.start()

    def enqueue(self, stations: Iterable[TaskName]) -> None:
        for station in dict.fromkeys(stations):
            if station not in self._waiting:
                self._waiting.add(station)
                self._queue.put(station)

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join(timeout=2)

    def _run(self) -> None:
        rung: dict[str, float] = {}
        while (station := self._queue.get()) is not None:
            time.sleep(max(0.0, rung.get(station, 0.0) + PAUSE_SECONDS - time.monotonic()))
            self._waiting.discard(station)
            rung[station] = time.monotonic()
            try:
                self._celery.send_task(
                    f"attune.{station}", queue=queue_name(station), ignore_result=True, expires=EXPIRES_SECONDS
                )
            except Exception as error:  # whatever a broker's library may raise: this thread must not die of it
                log.warning("the bell for %s did not ring (%s); the sweep will find the work", station, error)


def queue_name(station: TaskName) -> str:
    """A version's way home has a queue of its own, so that it never waits behind a day's feedback; so have judges and
    rollouts, which are slow, so that nothing waits behind them."""
    queues = {"train": "train", "evaluate": "publish", "publish": "publish", "judge": "judge", "rollout": "rollout"}
    return queues.get(station, "attune")


class BrokerConnection(KombuConnection):  # type: ignore[misc]
    """Kombu's pauses between attempts to reach a broker grow by 2 s to 30 s, which is how long a broker that is back
    would stay unseen. Neither Celery nor a setting says otherwise."""

    first_pause, longer, longest_pause = 0.5, 0.5, 4.0

    def _ensure_connection(
        self,
        errback: Any = None,
        max_retries: int | None = None,
        interval_start: float | None = None,
        interval_step: float | None = None,
        interval_max: float | None = None,
        **options: Any,
    ) -> Any:
        return super()._ensure_connection(
            errback,
            max_retries,
            self.first_pause if interval_start is None else interval_start,
            self.longer if interval_step is None else interval_step,
            self.longest_pause if interval_max is None else interval_max,
            **options,
        )


class PatientAMQP(AMQP):  # type: ignore[misc]
    Connection = BrokerConnection


def make_celery(broker_url: str | None, broker_dir: Path) -> Celery:
    """The Celery application, the same for those who ring and those who answer."""
    celery = Celery("attune", amqp=PatientAMQP)
    options: dict[str, Any] = REDIS if broker_url is not None and broker_url.startswith("redis") else {}
    if broker_url is None:
        broker_dir.mkdir(parents=True, exist_ok=True)
        folder = str(broker_dir)
        options = {
            "data_folder_in": folder,
            "data_folder_out": folder,
            "control_folder": f"{folder}/control",
            "polling_interval": 0.02,  # kombu's default of a second would be most of a version's way home
        }
    celery.conf.update(
        broker_url=broker_url or f"{SCHEME}://",
        broker_transport_options=options,
        broker_connection_retry_on_startup=True,
        broker_connection_max_retries=None,  # an outage may last
        task_serializer="json",
        accept_content=["json"],
        task_ignore_result=True,
        task_create_missing_queues=True,
        task_default_queue="attune",
        worker_hijack_root_logger=False,
        worker_enable_remote_control=False,
        worker_send_task_events=False,
        worker_prefetch_multiplier=1,
        task_publish_retry_policy={"max_retries": 1, "interval_start": 0.1},
    )
    return celery
