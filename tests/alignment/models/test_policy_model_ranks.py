"""More ranks, the same policy: what FSDP computes over gloo against one process, for every hat."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from alignment.config.trainer import LoRAConfig
from alignment.models.policy_model import PolicyModel
from tests.alignment.models.policy_model_ranks import KINDS, NUM_ROWS, describe, draw_rows, label

# Gradients are sums over the ranks' rows; cut differently, those in bfloat16 agree to a few of its 8 bits.
SAID = {"float32": {"atol": 1e-5, "rtol": 0}, "bfloat16": {"atol": 1e-3, "rtol": 0}}
GRADIENT = {"float32": {"atol": 1e-5, "rtol": 1e-5}, "bfloat16": {"atol": 0.05, "rtol": 0.05}}


@pytest.fixture(scope="module", params=[1, 2, 3])
def ranks(request: pytest.FixtureRequest, base_model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Files with what each rank computed, by kind of policy."""
    directory = tmp_path_factory.mktemp("ranks")
    torchrun = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={request.param}", "--standalone"]
    subprocess.run(
        [*torchrun, Path(__file__).parent / "policy_model_ranks.py", base_model, directory],
        check=True,
        timeout=300,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[3])},
    )
    return [directory / str(rank) for rank in range(request.param)]


@pytest.mark.parametrize(("lora", "dtype", "again"), KINDS, ids=[label(*kind) for kind in KINDS])
def test_any_number_of_ranks_computes_the_same(
    ranks: list[Path], build: Callable[..., PolicyModel], lora: LoRAConfig | None, dtype: str, again: bool
) -> None:
    alone = describe(build(lora, dtype=dtype, gradient_checkpointing=again), 0, 1)
    each = [load_file(path.parent / f"{label(lora, dtype, again)}-{path.name}.safetensors") for path in ranks]
    for name, wanted in alone.items():
        if name.endswith(("/scored", "/said")):
            torch.testing.assert_close(_together([figures[name] for figures in each]), wanted, **SAID[dtype])
            continue
        close = GRADIENT[dtype] if "/gradient/" in name else {"atol": 0, "rtol": 0}
        scale = 1.0 if dtype == "float32" else wanted.abs().max().clamp(min=1.0)
        for figures in each:
            torch.testing.assert_close(figures[name] / scale, wanted / scale, **close)
    assert all(figures.keys() == alone.keys() for figures in each)


def _together(parts: list[Tensor]) -> Tensor:
    """What the ranks said of their rows, in the order of all rows."""
    split = [
        list(part.split(draw_rows(range(NUM_ROWS)[rank :: len(parts)]).rows_N.bincount().tolist()))
        for rank, part in enumerate(parts)
    ]
    return torch.cat([split[row % len(parts)][row // len(parts)] for row in range(NUM_ROWS)])
