"""Run under torchrun by test_ranks: make updates and exports on all ranks."""

import json
import pickle
import sys
from pathlib import Path

from alignment.config.trainer import TrainerConfig
from alignment.errors import NonFiniteUpdate
from alignment.models.parallel import exit_process
from alignment.trainer.trainer import Trainer


def main(base_model: str, config: str, directory: str, *batches: str) -> None:
    trainer = Trainer(Path(base_model), TrainerConfig.model_validate_json(config))
    for number, batch in enumerate(batches, start=1):
        report = trainer.update(pickle.loads(Path(batch).read_bytes()))
        export = trainer.export(Path(directory) / f"shop-v{number}", {})
        assert export.manifest_sha256, "every rank gets the hash"
        if trainer.rank == 0:
            (Path(directory) / f"metrics-{number}").write_text(json.dumps(report.metrics))
    probe = trainer.probe()

    trainer.restore(Path(directory) / "shop-v1")
    trainer.restore(export.path)
    assert trainer.probe() == probe

    trainer.optimizers["actor"].config = trainer.optimizers["actor"].config.model_copy(update={"lr": 1e30})
    try:
        trainer.update(pickle.loads(Path(batches[0]).read_bytes()))
    except NonFiniteUpdate:
        assert trainer.probe() == probe
    else:
        raise AssertionError("a non-finite update must be rejected on every rank")
    (Path(directory) / f"rank-{trainer.rank}").write_text(str(probe.logprobs))
    exit_process()


if __name__ == "__main__":
    main(*sys.argv[1:])
