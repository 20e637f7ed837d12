"""The tracker protocol, and the wrappers that keep trackers from failing or delaying an update."""

import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from queue import Full, Queue
from typing import Protocol

from app.ops.experiment_log import Entry

log = logging.getLogger("attune.trackers")
MAX_QUEUED = 1000
CLOSE_SECONDS = 10.0


class Tracker(Protocol):
    """Its methods may raise anything. It is not used again after `close`."""

    def log(self, entry: Entry) -> None: ...

    def close(self) -> None: ...


class SafeTracker:
    """A tracker whose exceptions are logged, not raised.

    Every update is tried again. Of consecutive failures only the first is logged.
    """

    def __init__(self, name: str, tracker: Tracker) -> None:
        self.name = name
        self._tracker = tracker
        self._is_failing = False

    def log(self, entry: Entry) -> None:
        self._try(lambda: self._tracker.log(entry))

    def close(self) -> None:
        self._try(self._tracker.close)

    def _try(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:
            if not self._is_failing:
                log.warning("%s takes no metrics, learning goes on: %s: %s", self.name, type(error).__name__, error)
            self._is_failing = True
        else:
            self._is_failing = False


class BackgroundTracker:
    """A tracker that may be slow, such as W&B with its servers, and runs in a thread of its own."""

    def __init__(self, tracker: SafeTracker) -> None:
        self._tracker = tracker
        self._queue: Queue[Entry | None] = Queue(MAX_QUEUED)
        self._thread = threading.Thread(target=self._run, name=f"tracker {tracker.name}", daemon=True)
        self._thread.start()

    def log(self, entry: Entry) -> None:
        try:
            self._queue.put_nowait(entry)
        except Full:
            log.warning("%s is %d updates late and misses %s", self._tracker.name, MAX_QUEUED, entry.version)

    def close(self) -> None:
        with suppress(Full):
            self._queue.put_nowait(None)
            self._thread.join(CLOSE_SECONDS)

    def _run(self) -> None:
        while (entry := self._queue.get()) is not None:
            self._tracker.log(entry)
        self._tracker.close()
