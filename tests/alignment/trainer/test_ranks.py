"""Training with FSDP over gloo gives the same policy as one process."""

import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from alignment.artifacts.specs import ADAPTER, WEIGHTS
from alignment.config.policy_gradient_algorithms import PPOConfig
from alignment.config.preference_algorithms import DPOConfig
from alignment.config.trainer import OptimConfig, TrainerConfig
from alignment.trainer.trainer import Trainer
from alignment.types import Batch


def in_pairs(batch: Batch) -> Batch:
    """Group the samples in pairs, whose prompts are the same; algorithms without comparisons ignore the groups."""
    samples = (replace(sample, group=f"g{index // 2}") for index, sample in enumerate(batch.samples))
    return replace(batch, samples=tuple(samples))


FULL = {"lora": None, "optim": OptimConfig(lr=1e-5)}
PAIRS = {"algorithm": DPOConfig(minibatches=2)}  # the second batch has one pair, so most ranks have empty micro-batches
CRITIC = {"algorithm": PPOConfig(estimator="gae", epochs=2, minibatches=2, entropy_coef=0.01)}
FITTED = CRITIC | {"kl_target": 1e-5}  # the updates are scaled down, by their KL on held-out replies


@pytest.mark.parametrize(
    ("ranks", "settings"),
    [
        pytest.param(1, {}, marks=pytest.mark.slow),
        pytest.param(2, CRITIC, marks=pytest.mark.slow),
        (2, FITTED),
        pytest.param(3, PAIRS, marks=pytest.mark.slow),
        pytest.param(2, FULL, marks=pytest.mark.slow),
        pytest.param(2, CRITIC | {"dp_shard": 1}, marks=pytest.mark.slow),
        pytest.param(4, {"dp_shard": 2}, marks=pytest.mark.slow),
    ],
    ids=["1", "2-critic", "2-fitted", "3-pairs", "2-full", "2-replicated", "4-in-twos"],
)
def test_training_does_not_depend_on_number_of_ranks(
    base_model: Path,
    config: TrainerConfig,
    draw: Callable[..., Batch],
    tmp_path: Path,
    ranks: int,
    settings: dict[str, object],
) -> None:
    config = config.model_copy(update=settings)
    # odd sizes, and minibatches with fewer sequences than ranks
    held_out = draw(160, seed=3).samples if config.kl_target else ()
    per_prompt = 2 if isinstance(config.algorithm, DPOConfig) else 1
    random = (draw(11, seed=1, per_prompt=per_prompt), draw(3, seed=2, per_prompt=per_prompt))
    batches = [replace(in_pairs(batch), held_out=held_out) for batch in random]
    files = []
    for number, batch in enumerate(batches):
        files.append(tmp_path / f"batch-{number}")
        files[-1].write_bytes(pickle.dumps(batch))
    torchrun = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}", "--standalone"]
    script = Path(__file__).parent / "trainer_ranks.py"
    subprocess.run(
        [*torchrun, script, base_model, config.model_dump_json(), tmp_path / "out", *files],
        check=True,
        timeout=300,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[3])},
    )

    single_rank = Trainer(base_model, config)
    for number, batch in enumerate(batches, start=1):
        metrics = single_rank.update(batch).metrics
        rank_metrics = json.loads((tmp_path / "out" / f"metrics-{number}").read_text())
        measured = {name for name in metrics if not name.startswith(("perf", "timing_s"))}
        assert {name: rank_metrics[name] for name in measured} == pytest.approx(
            {n: metrics[n] for n in measured}, abs=1e-4, rel=1e-5
        )
        file = WEIGHTS if config.lora is None else ADAPTER
        two_ranks = load_file(tmp_path / "out" / f"shop-v{number}" / file)
        assert two_ranks.keys() == single_rank.policy.role_parameters("actor").keys()
        for name, parameter in single_rank.policy.role_parameters("actor").items():
            torch.testing.assert_close(two_ranks[name], parameter.detach(), atol=1e-5, rtol=0)
    probes = {(tmp_path / "out" / f"rank-{rank}").read_text() for rank in range(ranks)}
    assert len(probes) == 1
