"""What a tracker is, and what stands between it and an update."""

import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from queue import Full, Queue
from typing import Protocol

from app.ops.experiment_log import Entry

log = logging.getLogger("attune.trackers")
MOST_WAITING = 1000
CLOSE_SECONDS = 10.0


class Tracker(Protocol):
    """May raise anything. After `close` it is not used again."""

    def log(self, entry: Entry) -> None: ...

    def close(self) -> None: ...


class Guarded:
    """A tracker that cannot fail an update. Each update is a new chance for it; while it fails it is heard of once."""

    def __init__(self, name: str, tracker: Tracker) -> None:
        self.name = name
        self._tracker = tracker
        self._failing = False

    def log(self, entry: Entry) -> None:
        self._attempt(lambda: self._tracker.log(entry))

    def close(self) -> None:
        self._attempt(self._tracker.close)

    def _attempt(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:
            if not self._failing:
                log.warning("%s takes no metrics, learning goes on: %s: %s", self.name, type(error).__name__, error)
            self._failing = True
        else:
            self._failing = False


class Behind:
    """A tracker that takes its time (W&B's servers may be slow to answer) in a thread of its own."""

    def __init__(self, tracker: Guarded) -> None:
        self._tracker = tracker
        self._queue: Queue[Entry | None] = Queue(MOST_WAITING)
        self._thread = threading.Thread(target=self._run, name=f"tracker {tracker.name}", daemon=True)
        self._thread.start()

    def log(self, entry: Entry) -> None:
        try:
            self._queue.put_nowait(entry)
        except Full:
            log.warning("%s is %d updates late and misses %s", self._tracker.name, MOST_WAITING, entry.version)

    def close(self) -> None:
        with suppress(Full):
            self._queue.put_nowait(None)
            self._thread.join(CLOSE_SECONDS)

    def _run(self) -> None:
        while (entry := self._queue.get()) is not None:
            self._tracker.log(entry)
        self._tracker.close()
