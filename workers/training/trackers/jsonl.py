"""The experiment log: one JSON line per update in `$ATTUNE_HOME/metrics/{policy}.jsonl`; `attune analyze` reads it."""

from app.core.settings import Settings
from app.ops import experiment_log
from app.ops.experiment_log import Entry


class JsonlTracker:
    """Opens the file for each line, so that the file may be moved or deleted at any time."""

    def __init__(self, settings: Settings) -> None:
        self._directory = settings.metrics_dir

    def log(self, entry: Entry) -> None:
        experiment_log.append(self._directory, entry)

    def close(self) -> None:
        pass
