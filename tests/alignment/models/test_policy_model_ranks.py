"""FSDP over gloo computes the same as one process, for every role."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from alignment.config.trainer import LoRAConfig
from alignment.models.policy_model import PolicyModel
from tests.alignment.models.policy_model_ranks import KINDS, NUM_ROWS, compute_outputs, draw_inputs, label

# Gradients are sums over the ranks' rows; in bfloat16 a different order of summation changes a few of the 8 bits.
FORWARD: dict[str, dict[str, Any]] = {"float32": {"atol": 1e-5, "rtol": 0}, "bfloat16": {"atol": 1e-3, "rtol": 0}}
GRADIENT: dict[str, dict[str, Any]] = {
    "float32": {"atol": 1e-5, "rtol": 1e-5},
    "bfloat16": {"atol": 0.05, "rtol": 0.05},
}


@pytest.fixture(
    scope="module", params=[pytest.param(1, marks=pytest.mark.slow), 2, pytest.param(3, marks=pytest.mark.slow)]
)
def ranks(request: pytest.FixtureRequest, base_model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Return, for each rank, the path prefix of the files with its outputs."""
    directory = tmp_path_factory.mktemp("ranks")
    torchrun = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={request.param}", "--standalone"]
    subprocess.run(
        [*torchrun, Path(__file__).parent / "policy_model_ranks.py", base_model, directory],
        check=True,
        timeout=300,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[3])},
    )
    return [directory / str(rank) for rank in range(request.param)]


@pytest.mark.parametrize(("lora", "dtype", "checkpointing"), KINDS, ids=[label(*kind) for kind in KINDS])
def test_results_do_not_depend_on_number_of_ranks(
    ranks: list[Path], build: Callable[..., PolicyModel], lora: LoRAConfig | None, dtype: str, checkpointing: bool
) -> None:
    single_rank = compute_outputs(build(lora, dtype=dtype, activation_checkpointing=checkpointing), 0, 1)
    each = [load_file(path.parent / f"{label(lora, dtype, checkpointing)}-{path.name}.safetensors") for path in ranks]
    for name, expected in single_rank.items():
        if name.endswith(("/without_grad", "/with_grad")):
            torch.testing.assert_close(_merge_rows([outputs[name] for outputs in each]), expected, **FORWARD[dtype])
            continue
        close = GRADIENT[dtype] if "/gradient/" in name else {"atol": 0, "rtol": 0}
        scale = 1.0 if dtype == "float32" else expected.abs().max().clamp(min=1.0)
        for outputs in each:
            torch.testing.assert_close(outputs[name] / scale, expected / scale, **close)
    assert all(outputs.keys() == single_rank.keys() for outputs in each)


def _merge_rows(parts: list[Tensor]) -> Tensor:
    """Return the ranks' outputs in the order of all rows."""
    split = [
        list(part.split(draw_inputs(range(NUM_ROWS)[rank :: len(parts)]).rows_N.bincount().tolist()))
        for rank, part in enumerate(parts)
    ]
    return torch.cat([split[row % len(parts)][row // len(parts)] for row in range(NUM_ROWS)])
