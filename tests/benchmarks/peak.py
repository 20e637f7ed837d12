"""The memory that one update takes: `python -m tests.benchmarks.peak MODEL WHAT CONFIG`, in a process of its own.

WHAT is `base` (the base model alone scores the batch), or `update` (a learner with this config learns from it).
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from random import Random

import torch

from alignment.config.trainer import TrainerConfig
from alignment.data.micro_batches import plan, rows
from alignment.models.base_model import BaseLM
from alignment.models.loading import load_base
from alignment.trainer.trainer import Trainer
from alignment.types import Batch, Sample
from tests.benchmarks.candidates import Case, N, wide_groups

CPU = torch.device("cpu")


def measure(model: Path, what: str, config: TrainerConfig, threads: int, give_back: bool) -> tuple[int, int]:
    """Bytes over what the process had before it loaded anything: when all was loaded, and at the most.

    `give_back` has malloc return to the system whatever of 1 MB or more is freed. Otherwise torch's aligned blocks
    leave holes in glibc's heap that no block of the same size fits into.
    """
    command = [sys.executable, "-m", "tests.benchmarks.peak", str(model), what, config.model_dump_json(), str(threads)]
    environment = os.environ | ({"MALLOC_MMAP_THRESHOLD_": str(1 << 20)} if give_back else {})
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    loaded, most = json.loads(done.stdout.splitlines()[-1])
    return loaded, most


def score_with_base(case: Case, config: TrainerConfig) -> int:
    trunk = BaseLM(load_base(case.model, config.dtype, CPU), config.logits_chunk)
    loaded = _memory("VmRSS")
    with torch.no_grad():
        for group in plan(case.sequences, config.microbatch_tokens, packing=config.packing):
            trunk(rows([case.sequences[index] for index in group], CPU, config.packing))
    return loaded


def update(case: Case, config: TrainerConfig) -> int:
    learner = Trainer(case.model, config)
    loaded = _memory("VmRSS")
    random = Random(0)
    samples = tuple(
        Sample(
            turn_id=f"turn-{index}",
            prompt_ids=sequence.ids[: sequence.start],
            output_ids=sequence.ids[sequence.start :],
            logprobs=(-10.4,) * (len(sequence.ids) - sequence.start),
            reward=random.random(),
            version=0,
            group=f"prompt-{index // N}",
        )
        for index, sequence in enumerate(case.sequences)
    )
    learner.update(Batch("batch", "shop", samples))
    return loaded


def _memory(field: str) -> int:
    """VmRSS is what the process has, VmHWM the most it ever had."""
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found
    return int(found[1]) * 1024


def main(model: str, what: str, config: str, threads: str) -> None:
    torch.set_num_threads(int(threads))
    case, settings = wide_groups(Path(model), 4), TrainerConfig.model_validate_json(config)
    Path("/proc/self/clear_refs").write_text("5")  # the most so far is what there is
    before = _memory("VmRSS")
    loaded = score_with_base(case, settings) if what == "base" else update(case, settings)
    print(json.dumps([loaded - before, _memory("VmHWM") - before]))


if __name__ == "__main__":
    main(*sys.argv[1:])
