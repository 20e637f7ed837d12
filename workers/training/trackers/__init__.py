"""Experiment trackers: log the metrics of every update. A tracker can neither fail an update nor delay it."""

import logging
import math
import time
from collections.abc import Callable, Mapping
from typing import Any

from app.core.settings import Settings, TrackerName
from app.ops.experiment_log import Entry, require_trackers
from workers.training.trackers.base import BackgroundTracker, SafeTracker, Tracker
from workers.training.trackers.jsonl import JsonlTracker
from workers.training.trackers.tensorboard import TensorBoardTracker
from workers.training.trackers.weights_and_biases import WandbTracker

log = logging.getLogger("attune.trackers")
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
        require_trackers(settings.trackers)
        self._trackers: list[SafeTracker | BackgroundTracker] = []
        for name in dict.fromkeys(settings.trackers):
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


def _is_finite(value: Any) -> bool:
    try:
        return math.isfinite(value)
    except (TypeError, ValueError):
        return False
