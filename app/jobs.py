"""Jobs: rows are truth, messages are nudges. This is the sending half: a nudge says "look at the database"."""

import logging
import queue
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

from celery import Celery
from kombu import transport
from kombu.exceptions import OperationalError
from sqlalchemy.engine import Connection
from sqlalchemy.ext.asyncio import AsyncSession

Station = Literal["curate", "assemble", "train", "evaluate", "publish", "sweep"]
log = logging.getLogger("attune.jobs")
NUDGES = "attune_nudges"
PAUSE_SECONDS = 0.02
SCHEME = "attune-folder"
transport.TRANSPORT_ALIASES[SCHEME] = "app.bell:Transport"


def nudge(session: AsyncSession | Connection, *stations: Station) -> None:
    """Ring these stations once this transaction has committed; never if it rolls back."""
    session.info.setdefault(NUDGES, []).extend(stations)


class Bell:
    """Sends nudges from a thread of its own: a broker that is down or slow never delays a request.

    A station that is already waiting to be rung is not queued twice, and one that has just been rung waits a moment:
    a thousand thumbs a second are fifty messages. A lost nudge costs time, not work: the sweep
    finds the row.
    """

    def __init__(self, celery: Celery) -> None:
        self._celery = celery
        self._waiting: set[str] = set()
        self._queue: queue.SimpleQueue[Station | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="bell", daemon=True)
        self._thread.start()

    def ring(self, stations: Iterable[Station]) -> None:
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
                self._celery.send_task(f"attune.{station}", queue=queue_of(station), ignore_result=True, expires=60)
            except (OperationalError, OSError) as error:
                log.warning("the bell for %s did not ring (%s); the sweep will find the work", station, error)


def queue_of(station: Station) -> str:
    """A version's way home has a queue of its own, so that it never waits behind a day's feedback."""
    return {"train": "train", "evaluate": "publish", "publish": "publish"}.get(station, "attune")


def make_celery(broker_url: str | None, bell_dir: Path) -> Celery:
    """The Celery application, the same for those who ring and those who answer."""
    celery = Celery("attune")
    options: dict[str, Any] = {}
    if broker_url is None:
        bell_dir.mkdir(parents=True, exist_ok=True)
        folder = str(bell_dir)
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
