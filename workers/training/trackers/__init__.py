"""Trackers: where the metrics of every update go. None of them can fail an update, or hold it up."""

import logging
import math
import time
from collections.abc import Callable, Mapping
from typing import Any

from app.core.settings import Settings, TrackerName
from app.ops import tracker_packages
from app.ops.experiment_log import Entry
from workers.training.trackers.base import Behind, Guarded, Tracker
from workers.training.trackers.jsonl import Jsonl
from workers.training.trackers.tensorboard import TensorBoard
from workers.training.trackers.weights_and_biases import WeightsAndBiases

log = logging.getLogger("attune.trackers")
TRACKERS: dict[TrackerName, Callable[[Settings], Tracker]] = {
    "jsonl": Jsonl,
    "tensorboard": TensorBoard,
    "wandb": WeightsAndBiases,
}
SLOW = ("wandb",)  # they wait for a network


class Trackers:
    """Those that ATTUNE_TRACKERS names. Rank 0 has them, and nobody else.

    Example:
        trackers = Trackers(settings)      # ValueError: a tracker whose package is missing
        trackers.log("assistant", "assistant-3f2a1b-v12", 12, "batch-9c…", {"actor/ppo_kl": 0.002})
        trackers.close()
    """

    def __init__(self, settings: Settings) -> None:
        tracker_packages.require(settings.trackers)
        self._trackers: list[Guarded | Behind] = []
        for name in dict.fromkeys(settings.trackers):
            guarded = Guarded(name, TRACKERS[name](settings))
            self._trackers.append(Behind(guarded) if name in SLOW else guarded)

    def log(self, policy: str, version: str, number: int, batch_id: str, metrics: Mapping[str, float]) -> None:
        """`version` is the adapter's name, `{line}-v{number}`. What is no finite number is left out, and named."""
        finite = {name: float(value) for name, value in metrics.items() if _finite(value)}
        left_out = tuple(sorted(metrics.keys() - finite.keys()))
        if left_out:
            log.warning("%s: no finite number, so not tracked: %s", version, ", ".join(left_out))
        entry = Entry(policy, version, number, batch_id, time.time(), finite, left_out)
        for tracker in self._trackers:
            tracker.log(entry)

    def close(self) -> None:
        """What is still on its way is written, if that is a matter of seconds."""
        for tracker in self._trackers:
            tracker.close()


def _finite(value: Any) -> bool:
    try:
        return math.isfinite(value)
    except (TypeError, ValueError):
        return False
