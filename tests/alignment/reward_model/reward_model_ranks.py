"""Run under torchrun by test_ranks: fit, export and score on all ranks."""

import json
import pickle
import sys
from pathlib import Path

from alignment.config.trainer import TrainerConfig
from alignment.errors import DamagedAdapter
from alignment.models.parallel import exit_process
from alignment.reward_model.dataset import PreferenceDataset
from alignment.reward_model.model import RewardModel
from alignment.trainer.trainer import Trainer


def main(base_model: str, config: str, directory: str, dataset_file: str) -> None:
    trainer = Trainer(Path(base_model), TrainerConfig.model_validate_json(config))
    dataset: PreferenceDataset = pickle.loads(Path(dataset_file).read_bytes())
    model = RewardModel(trainer)
    model.begin(dataset)
    while not model.advance(3):
        trainer.probe()  # another role is used during the fit
    metrics = model.finish()
    export = model.export(Path(directory) / "rm-1", {})
    scores = model.score(dataset.replies)
    model.restore(export.path, export.manifest_sha256)
    assert model.score(dataset.replies) == scores
    assert len(model.score(dataset.replies[:1])) == 1, "fewer replies than ranks"
    try:
        model.restore(export.path, "0" * 64)
    except DamagedAdapter:
        pass
    else:
        raise AssertionError("every rank must reject a manifest with another hash")
    result = {"metrics": metrics, "scores": scores, "sha256": export.manifest_sha256}
    (Path(directory) / f"rank-{trainer.rank}").write_text(json.dumps(result))
    exit_process()


if __name__ == "__main__":
    main(*sys.argv[1:])
