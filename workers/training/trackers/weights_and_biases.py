"""Weights & Biases: a run a line of versions, taken up again after a restart. Its own WANDB_* variables hold."""

from typing import TYPE_CHECKING

from app.core.settings import Settings
from app.ops.experiment_log import Entry

if TYPE_CHECKING:
    import wandb

INIT_SECONDS, FINISH_SECONDS = 30.0, 8.0


class WeightsAndBiases:
    """WANDB_MODE=offline needs no network: runs lie in `$ATTUNE_HOME/metrics/wandb` until `wandb sync` takes them."""

    def __init__(self, settings: Settings) -> None:
        import wandb  # an extra: only who names this tracker has it

        self._wandb = wandb
        self._folder = settings.metrics_dir
        self._runs: dict[str, wandb.Run] = {}

    def log(self, entry: Entry) -> None:
        if entry.line not in self._runs:
            self._runs[entry.line] = self._begin(entry)
        self._runs[entry.line].log(entry.metrics, step=entry.number, commit=True)

    def _begin(self, entry: Entry) -> "wandb.Run":
        self._folder.mkdir(parents=True, exist_ok=True)
        settings = self._wandb.Settings(
            console="off",  # the trainer's output is nobody else's business
            silent=True,
            init_timeout=INIT_SECONDS,
            finish_timeout=FINISH_SECONDS,
        )
        return self._wandb.init(
            project=self._wandb.setup().settings.project or "attune",
            id=entry.line,
            name=entry.line,
            dir=str(self._folder),
            resume="allow",
            reinit="create_new",  # several policies, one process
            settings=settings,
        )

    def close(self) -> None:
        for run in self._runs.values():
            run.finish()
