"""Weights & Biases: one run for each line of versions, resumed after a restart. Configured by WANDB_* variables."""

from typing import TYPE_CHECKING

from app.core.settings import Settings
from app.ops.experiment_log import Entry

if TYPE_CHECKING:
    import wandb

INIT_SECONDS, FINISH_SECONDS = 30.0, 8.0


class WandbTracker:
    """With WANDB_MODE=offline, runs are stored in `$ATTUNE_HOME/metrics/wandb` until `wandb sync` uploads them."""

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
