"""Run under torchrun by test_ranks: a fit, its export and its scores, on as many ranks as there are."""

import json
import sys
from pathlib import Path

from alignment.config.trainer import TrainerConfig
from alignment.errors import DamagedAdapter
from alignment.models.parallel import leave
from alignment.reward_model.dataset import PreferenceDataset
from alignment.reward_model.model import RewardModel
from alignment.trainer.trainer import Trainer


def main(base_model: str, config: str, directory: str, words: str) -> None:
    learner = Trainer(Path(base_model), TrainerConfig.model_validate_json(config))
    said = PreferenceDataset.from_bytes(Path(words).read_bytes())
    model = RewardModel(learner)
    model.begin(said)
    while not model.advance(3):
        learner.probe()  # another hat is asked meanwhile
    fit = model.finish()
    export = model.export(Path(directory) / "rm-1", {})
    scores = model.score(said.replies)
    model.restore(export.path, export.manifest_sha256)
    assert model.score(said.replies) == scores
    assert len(model.score(said.replies[:1])) == 1, "fewer replies than ranks"
    try:
        model.restore(export.path, "0" * 64)
    except DamagedAdapter:
        pass
    else:
        raise AssertionError("every rank refuses what is not what was sealed")
    told = {"metrics": fit.metrics, "scores": scores, "sha256": export.manifest_sha256}
    (Path(directory) / f"rank-{learner.rank}").write_text(json.dumps(told))
    leave()


if __name__ == "__main__":
    main(*sys.argv[1:])
