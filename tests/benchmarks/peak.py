"""Measure the peak memory of one update in its own process: `python -m tests.benchmarks.peak MODEL WHAT CONFIG`.

WHAT is `base` (the base model alone scores the batch), or `update` (a trainer with this config is updated from it).
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
from alignment.data.micro_batches import make_micro_batches, make_model_inputs
from alignment.models.base_model import BaseLM, load_base_model
from alignment.trainer.trainer import Trainer
from alignment.types import Batch, Sample
from tests.benchmarks.candidates import Case, N, wide_groups

CPU = torch.device("cpu")


def measure(model: Path, what: str, config: TrainerConfig, threads: int, return_memory: bool) -> tuple[int, int]:
    """Return the memory after loading and the peak, in bytes above that of the process before it loaded anything.

    With `return_memory` malloc returns freed blocks of 1 MB or more to the system. Otherwise torch's aligned blocks
    leave holes in glibc's heap that blocks of the same size do not fit into.
    """
    command = [sys.executable, "-m", "tests.benchmarks.peak", str(model), what, config.model_dump_json(), str(threads)]
    environment = os.environ | ({"MALLOC_MMAP_THRESHOLD_": str(1 << 20)} if return_memory else {})
    result = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    loaded, peak = json.loads(result.stdout.splitlines()[-1])
    return loaded, peak


def score_with_base(case: Case, config: TrainerConfig) -> int:
    base_lm = BaseLM(load_base_model(case.model, config.dtype, CPU), config.logits_chunk)
    loaded = _memory("VmRSS")
    with torch.no_grad():
        for group in make_micro_batches(case.sequences, config.micro_batch_tokens, packing=config.packing):
            base_lm(make_model_inputs([case.sequences[index] for index in group], CPU, config.packing))
    return loaded


def update(case: Case, config: TrainerConfig) -> int:
    trainer = Trainer(case.model, config)
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
    trainer.update(Batch("batch", "shop", samples))
    return loaded


def _memory(field: str) -> int:
    """Return a field of /proc/self/status in bytes: VmRSS is the current memory, VmHWM its peak."""
    match = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert match
    return int(match[1]) * 1024


def main(model: str, what: str, config: str, threads: str) -> None:
    torch.set_num_threads(int(threads))
    case, settings = wide_groups(Path(model), 4), TrainerConfig.model_validate_json(config)
    Path("/proc/self/clear_refs").write_text("5")  # reset the peak to the current memory
    before = _memory("VmRSS")
    loaded = score_with_base(case, settings) if what == "base" else update(case, settings)
    print(json.dumps([loaded - before, _memory("VmHWM") - before]))


if __name__ == "__main__":
    main(*sys.argv[1:])
