"""Gradient checkpointing changes memory, and not one bit of a gradient."""

import json
from collections.abc import Callable
from pathlib import Path
from shutil import copytree

import pytest
import torch
from torch import Tensor

from alignment.config.trainer import LoRAConfig, TrainerConfig
from alignment.models.policy_model import ModelRole, PolicyModel, Rows
from tests.alignment.models.policy_model_ranks import LORA, draw_rows, dress

Build = Callable[..., PolicyModel]
CPU = torch.device("cpu")


def gradients(policy: PolicyModel, hat: ModelRole) -> dict[str, Tensor]:
    return {name: tensor.grad.clone() for name, tensor in policy.tensors(hat).items() if tensor.grad is not None}


@pytest.mark.parametrize("hat", ["actor", "critic"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("lora", [LORA, None], ids=["lora", "full"])
def test_gradients_are_the_same_bits(
    build: Build, rows: Rows, lora: LoRAConfig | None, dtype: str, hat: ModelRole
) -> None:
    found = []
    for again in (False, True):
        policy = build(lora, dtype=dtype, gradient_checkpointing=again)
        policy(rows, hat).sin().sum().backward()
        found.append(gradients(policy, hat))
    kept, recomputed = found
    assert kept.keys() == recomputed.keys() and kept
    assert all(torch.equal(kept[name], recomputed[name]) for name in kept)


def test_what_is_recomputed_wears_the_hat_of_its_forward(build: Build, rows: Rows) -> None:
    found = []
    for again in (False, True):
        policy = build(gradient_checkpointing=again)
        loss = policy(rows, "actor").sin().sum()
        for other in ("anchor", "critic", "reference"):
            policy(rows, other)
        loss.backward()
        found.append(gradients(policy, "actor"))
        assert all(tensor.grad is None for tensor in policy.tensors("critic").values())
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


def test_fewer_activations_are_kept(build: Build) -> None:
    rows, kept = draw_rows(range(4), num_tokens=64), []
    for again in (False, True):
        policy, bytes_ = build(gradient_checkpointing=again), 0

        def count(tensor: Tensor) -> Tensor:
            nonlocal bytes_
            bytes_ += tensor.numel() * tensor.element_size()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
            policy(rows)
        kept.append(bytes_)
    assert kept[1] < kept[0] / 2


def test_dropout_stays_off(base_model: Path, rows: Rows, tmp_path: Path) -> None:
    directory = copytree(base_model, tmp_path / "base")
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"attention_dropout": 0.5}))
    found = []
    for path in (base_model, directory):
        policy = PolicyModel(path, TrainerConfig(lora=LORA, gradient_checkpointing=True), CPU)
        dress(policy)
        policy(rows).sum().backward()
        found.append(gradients(policy, "actor"))
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])
