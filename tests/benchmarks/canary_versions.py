"""Train the versions for the canary benchmark: a serving, a worse and a better one, exported as by a trainer.

The trainer's own code trains them in one process. The worse version continues from the serving one with every vote
inverted, the better one with the votes as they are. Their approval is measured on simulated users whose votes are not
trained on.
"""

import json
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from demo.train import MODEL
from tests.benchmarks.learning import RUNS
from tests.benchmarks.swap_versions import UnpublishedVersion
from tests.support.offline.experiment import Experiment, ExperimentConfig

RUN_CONFIG = RUNS["PPO, running baseline"]
UPDATES = {"serving": 4, "worse": 7, "better": 5}  # of 96 replies; the last two continue from the first
EVALUATION_USERS = 256  # about 720 replies: a share of a half has a standard error of 1.9 points
SUMMARY = "versions.json"


@dataclass(frozen=True)
class Candidate:
    """`approval` by users whose votes are not trained on, and the number of `replies` that they rated."""

    version: UnpublishedVersion
    approval: float
    replies: int


def trained_versions(directory: Path, seed: int, max_updates: int | None = None) -> dict[str, Candidate]:
    """Return the versions by name; they are read from `directory` if they exist there. `seed`: of the training."""
    summary = directory / f"seed-{seed}" / SUMMARY
    if not summary.exists():
        shutil.rmtree(summary.parent, ignore_errors=True)
        summary.parent.mkdir(parents=True)
        summary.write_text(json.dumps(_train_versions(summary.parent, seed, max_updates)))
    rows = json.loads(summary.read_text())
    return {
        name: Candidate(
            UnpublishedVersion(summary.parent / name, row["sha256"], row["probe"]), row["approval"], row["replies"]
        )
        for name, row in rows.items()
    }


def _train_versions(folder: Path, seed: int, max_updates: int | None) -> dict[str, dict[str, Any]]:
    updates = {name: min(count, max_updates or count) for name, count in UPDATES.items()}
    config = replace(RUN_CONFIG, seed=seed, config=RUN_CONFIG.config.model_copy(update={"seed": seed}))
    experiment, rows = Experiment(MODEL, config), {}
    rows["serving"] = _train_version(experiment, folder, "serving", updates["serving"])
    rows["better"] = _train_version(experiment, folder, "better", updates["better"])
    inverted: ExperimentConfig = replace(config, mistake_share=1.0)
    experiment = Experiment(MODEL, inverted)
    experiment.restore(folder / "serving")
    rows["worse"] = _train_version(experiment, folder, "worse", updates["worse"])
    return rows


def _train_version(experiment: Experiment, folder: Path, name: str, updates: int) -> dict[str, Any]:
    for _ in range(updates):
        experiment.run_update()
    probe, evaluation = experiment.probe(), experiment.evaluate(EVALUATION_USERS)
    print(f"{folder.name}, {name}: {evaluation.approval:.1%} of {evaluation.replies} replies approved", flush=True)
    return {
        "sha256": experiment.export(folder / name),
        "probe": {"ids": [list(ids) for ids in probe.ids], "logprobs": [list(row) for row in probe.logprobs]},
        "approval": evaluation.approval,
        "replies": evaluation.replies,
    }
