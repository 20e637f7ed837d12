"""A line of JSON per update, in `$ATTUNE_HOME/metrics/{policy}.jsonl`; `attune analyze` reads it."""

from app.core.settings import Settings
from app.ops import experiment_log
from app.ops.experiment_log import Entry


class Jsonl:
    """Opens the file for each line: whoever moves or deletes it meanwhile finds the next line in a fresh one."""

    def __init__(self, settings: Settings) -> None:
        self._folder = settings.metrics_dir

    def log(self, entry: Entry) -> None:
        experiment_log.append(self._folder, entry)

    def close(self) -> None:
        pass
