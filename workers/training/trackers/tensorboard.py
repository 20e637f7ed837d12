"""TensorBoard's event files, in `$ATTUNE_HOME/metrics/tensorboard`, a run a line of versions."""

from app.core.settings import Settings
from app.ops.experiment_log import Entry


class TensorBoard:
    def __init__(self, settings: Settings) -> None:
        from torch.utils.tensorboard import SummaryWriter  # an extra: only who names this tracker has it

        self._make = SummaryWriter
        self._folder = settings.metrics_dir / "tensorboard"
        self._writers: dict[str, SummaryWriter] = {}

    def log(self, entry: Entry) -> None:
        writer = self._writers.pop(entry.line, None) or self._make(log_dir=str(self._folder / entry.line))
        for name, value in entry.metrics.items():
            writer.add_scalar(name, value, entry.number, walltime=entry.time)
        writer.flush()
        self._writers[entry.line] = writer  # one that failed is not kept: its thread may be dead

    def close(self) -> None:
        for writer in self._writers.values():
            writer.close()
