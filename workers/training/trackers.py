"""Experiment trackers: log the metrics of every update. A tracker can neither fail an update nor delay it."""

import logging
import math
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from queue import Full, Queue
from typing import TYPE_CHECKING, Protocol

from app.core.settings import Settings, TrackerName
from app.ops import experiment_log
from app.ops.experiment_log import Entry, require_trackers

if TYPE_CHECKING:
    import wandb

log = logging.getLogger("attune.trackers")
MAX_QUEUED = 1000
CLOSE_SECONDS = 10.0
INIT_SECONDS, FINISH_SECONDS = 30.0, 8.0  # of a W&B run


class Tracker(Protocol):
    """Its methods may raise anything. It is not used again after `close`."""

    def log(self, entry: Entry) -> None: ...

    def close(self) -> None: ...


class JsonlTracker:
    """One JSON line per update in `$ATTUNE_HOME/metrics/{policy}.jsonl`, which `attune analyze` reads.

    Opens the file for each line, so that the file may be moved or deleted at any time.
    """

    def __init__(self, settings: Settings) -> None:
        self._directory = settings.metrics_dir

    def log(self, entry: Entry) -> None:
        experiment_log.append(self._directory, entry)

    def close(self) -> None:
        pass


class TensorBoardTracker:
    """Event files in `$ATTUNE_HOME/metrics/tensorboard`: one run for each line of versions."""

    def __init__(self, settings: Settings) -> None:
        from torch.utils.tensorboard import SummaryWriter  # an optional dependency

        self._writer_type = SummaryWriter
        self._directory = settings.metrics_dir / "tensorboard"
        self._writers: dict[str, SummaryWriter] = {}

    def log(self, entry: Entry) -> None:
        writer = self._writers.pop(entry.run_name, None) or self._writer_type(
            log_dir=str(self._directory / entry.run_name)
        )
        for name, value in entry.metrics.items():
            writer.add_scalar(name, value, entry.number, walltime=entry.time)
        writer.flush()
        self._writers[entry.run_name] = writer  # only after success: the thread of a writer that failed may be dead

    def close(self) -> None:
        for writer in self._writers.values():
            writer.close()


class WandbTracker:
    """Weights & Biases: one run for each line of versions, resumed after a restart. Configured by WANDB_* variables.

    With WANDB_MODE=offline, runs are stored in `$ATTUNE_HOME/metrics/wandb` until `wandb sync` uploads them.
    """

    def __init__(self, settings: Settings) -> None:
        import wandb  # an optional dependency

        self._wandb = wandb
        self._directory = settings.metrics_dir
        self._runs: dict[str, wandb.Run] = {}

    def log(self, entry: Entry) -> None:
        if entry.run_name not in self._runs:
            self._runs[entry.run_name] = self._init_run(entry)
        self._runs[entry.run_name].log(entry.metrics, step=entry.number, commit=True)

    def _init_run(self, entry: Entry) -> "wandb.Run":
        self._directory.mkdir(parents=True, exist_ok=True)
        settings = self._wandb.Settings(
            console="off",  # do not upload the trainer's output
            silent=True,
            init_timeout=INIT_SECONDS,
            finish_timeout=FINISH_SECONDS,
        )
        return self._wandb.init(
            project=self._wandb.setup().settings.project or "attune",
            id=entry.run_name,
            name=entry.run_name,
            dir=str(self._directory),
            resume="allow",
            reinit="create_new",  # one process logs the runs of several policies
            settings=settings,
        )

    def close(self) -> None:
        for run in self._runs.values():
            run.finish()


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
                log.warning("%s accepts no metrics; training continues: %s: %s", self.name, type(error).__name__, error)
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


TRACKERS: dict[TrackerName, Callable[[Settings], Tracker]] = {
    "jsonl": JsonlTracker,
    "tensorboard": TensorBoardTracker,
    "wandb": WandbTracker,
}
BACKGROUND_TRACKERS = ("wandb",)  # they wait for a network


class Trackers:
    """The trackers that the settings name. Only rank 0 has them.

    Example:
        trackers = Trackers(settings)      # ValueError if a tracker's package is missing
        trackers.log("assistant", "assistant-3f2a1b-v12", 12, "batch-9c…", {"actor/ppo_kl": 0.002})
        trackers.close()
    """

    def __init__(self, settings: Settings) -> None:
        require_trackers(settings.observability.trackers)
        self._trackers: list[SafeTracker | BackgroundTracker] = []
        for name in dict.fromkeys(settings.observability.trackers):
            tracker = SafeTracker(name, TRACKERS[name](settings))
            self._trackers.append(BackgroundTracker(tracker) if name in BACKGROUND_TRACKERS else tracker)

    def log(self, policy: str, version: str, number: int, batch_id: str, metrics: Mapping[str, float]) -> None:
        """Log one update. `version` is the adapter's name, `{line}-v{number}`.

        Metrics that are not finite numbers are left out, and the entry names them.
        """
        finite = {name: float(value) for name, value in metrics.items() if _is_finite(value)}
        left_out = tuple(sorted(metrics.keys() - finite.keys()))
        if left_out:
            log.warning("%s: no finite number, so not tracked: %s", version, ", ".join(left_out))
        entry = Entry(policy, version, number, batch_id, time.time(), finite, left_out)
        for tracker in self._trackers:
            tracker.log(entry)

    def close(self) -> None:
        """Write the entries that are still queued, within a few seconds."""
        for tracker in self._trackers:
            tracker.close()


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except (TypeError, ValueError):
        return False
