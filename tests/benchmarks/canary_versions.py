"""Versions for the canaries: one that serves, a worse one and a better one, each as a trainer leaves it.

All are taught by the trainer's own learner in one process. The worse one goes on from what serves with every thumb
turned round, the better one with the thumbs as they are. What they are truly worth is measured on shoppers that teach
nobody.
"""

import json
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from demo.offline.experiment import Experiment, ExperimentConfig
from demo.train import MODEL
from tests.benchmarks.learning import COURSES
from tests.benchmarks.swap_versions import Made

HONEST = COURSES["PPO, running baseline"]
UPDATES = {"serving": 4, "worse": 7, "better": 5}  # of 96 replies; the last two go on from the first
EXAMINERS = 256  # about 720 replies: a share of a half has a standard error of 1.9 points
TOLD = "taught.json"


@dataclass(frozen=True)
class Candidate:
    """`approval` on shoppers that teach nobody, and the number of replies that they judged."""

    made: Made
    approval: float
    replies: int


def trained_versions(aside: Path, seed: int) -> dict[str, Candidate]:
    """By name; from `aside` if they were taught before. `seed`: of the lessons; who chats with them later is another
    matter."""
    told = aside / f"seed-{seed}" / TOLD
    if not told.exists():
        shutil.rmtree(told.parent, ignore_errors=True)
        told.parent.mkdir(parents=True)
        told.write_text(json.dumps(_train_versions(told.parent, seed)))
    rows = json.loads(told.read_text())
    return {
        name: Candidate(Made(told.parent / name, row["sha256"], row["probe"]), row["approval"], row["replies"])
        for name, row in rows.items()
    }


def _train_versions(folder: Path, seed: int) -> dict[str, dict[str, Any]]:
    honest = replace(HONEST, seed=seed, config=HONEST.config.model_copy(update={"seed": seed}))
    study, rows = Experiment(MODEL, honest), {}
    rows["serving"] = _train_version(study, folder, "serving")
    rows["better"] = _train_version(study, folder, "better")
    spoilt: ExperimentConfig = replace(honest, mistake_share=1.0)
    study = Experiment(MODEL, spoilt)
    study.restore(folder / "serving")
    rows["worse"] = _train_version(study, folder, "worse")
    return rows


def _train_version(study: Experiment, folder: Path, name: str) -> dict[str, Any]:
    for _ in range(UPDATES[name]):
        study.run_update()
    probe, evaluation = study.probe(), study.evaluate(EXAMINERS)
    print(f"{folder.name}, {name}: {evaluation.approval:.1%} of {evaluation.replies} replies approved", flush=True)
    return {
        "sha256": study.export(folder / name),
        "probe": {"ids": [list(ids) for ids in probe.ids], "logprobs": [list(row) for row in probe.logprobs]},
        "approval": evaluation.approval,
        "replies": evaluation.replies,
    }
