"""Run under torchrun by test_ranks: two updates and an export, on as many ranks as there are."""

import json
import sys
from pathlib import Path

from alignment.config.trainer import TrainerConfig
from alignment.errors import NonFiniteUpdate
from alignment.models.parallel import leave
from alignment.trainer.trainer import Trainer
from alignment.types import Batch


def main(base_model: str, config: str, directory: str, *batches: str) -> None:
    learner = Trainer(Path(base_model), TrainerConfig.model_validate_json(config))
    for number, batch in enumerate(batches, start=1):
        report = learner.update(Batch.from_bytes(Path(batch).read_bytes()))
        export = learner.export(Path(directory) / f"shop-v{number}", {})
        assert export.manifest_sha256, "every rank learns the hash"
        if learner.rank == 0:
            (Path(directory) / f"metrics-{number}").write_text(json.dumps(report.metrics))
    probe = learner.probe()

    learner.restore(Path(directory) / "shop-v1")
    learner.restore(export.path)
    assert learner.probe() == probe

    learner.optimizer.config = learner.optimizer.config.model_copy(update={"lr": 1e30})
    try:
        learner.update(Batch.from_bytes(Path(batches[0]).read_bytes()))
    except NonFiniteUpdate:
        assert learner.probe() == probe
    else:
        raise AssertionError("an update that explodes must be refused on every rank")
    (Path(directory) / f"rank-{learner.rank}").write_text(str(probe.logprobs))
    leave()


if __name__ == "__main__":
    main(*sys.argv[1:])
