"""TensorBoard event files in `$ATTUNE_HOME/metrics/tensorboard`: one run for each line of versions."""

from app.core.settings import Settings
from app.ops.experiment_log import Entry


class TensorBoardTracker:
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
