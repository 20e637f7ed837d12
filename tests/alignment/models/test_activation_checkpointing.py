"""Activation checkpointing saves memory and does not change any bit of a gradient."""

import json
from collections.abc import Callable
from pathlib import Path
from shutil import copytree

import pytest
import torch
from torch import Tensor

from alignment.config.trainer import LoRAConfig, TrainerConfig
from alignment.models.policy_model import ModelInputs, ModelRole, PolicyModel
from tests.alignment.models.policy_model_ranks import LORA, draw_inputs, randomize_roles

Build = Callable[..., PolicyModel]
CPU = torch.device("cpu")


def gradients(policy: PolicyModel, role: ModelRole) -> dict[str, Tensor]:
    return {
        name: tensor.grad.clone() for name, tensor in policy.role_parameters(role).items() if tensor.grad is not None
    }


@pytest.mark.parametrize("role", ["actor", "critic"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("lora", [LORA, None], ids=["lora", "full"])
def test_gradients_are_bit_identical_with_checkpointing(
    build: Build, inputs: ModelInputs, lora: LoRAConfig | None, dtype: str, role: ModelRole
) -> None:
    results = []
    for checkpointing in (False, True):
        policy = build(lora, dtype=dtype, gradient_checkpointing=checkpointing)
        policy(inputs, role).sin().sum().backward()
        results.append(gradients(policy, role))
    stored, recomputed = results
    assert stored.keys() == recomputed.keys() and stored
    assert all(torch.equal(stored[name], recomputed[name]) for name in stored)


def test_recomputation_uses_the_role_of_the_forward_pass(build: Build, inputs: ModelInputs) -> None:
    results = []
    for checkpointing in (False, True):
        policy = build(gradient_checkpointing=checkpointing)
        loss = policy(inputs, "actor").sin().sum()
        for other in ("anchor", "critic", "reference"):
            policy(inputs, other)
        loss.backward()
        results.append(gradients(policy, "actor"))
        assert all(tensor.grad is None for tensor in policy.role_parameters("critic").values())
    assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])


def test_checkpointing_stores_fewer_activations(build: Build) -> None:
    inputs, kept = draw_inputs(range(4), num_tokens=64), []
    for checkpointing in (False, True):
        policy, bytes_ = build(gradient_checkpointing=checkpointing), 0

        def count(tensor: Tensor) -> Tensor:
            nonlocal bytes_
            bytes_ += tensor.numel() * tensor.element_size()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
            policy(inputs)
        kept.append(bytes_)
    assert kept[1] < kept[0] / 2


def test_dropout_is_disabled(base_model: Path, inputs: ModelInputs, tmp_path: Path) -> None:
    directory = copytree(base_model, tmp_path / "base")
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"attention_dropout": 0.5}))
    results = []
    for path in (base_model, directory):
        policy = PolicyModel(path, TrainerConfig(lora=LORA, gradient_checkpointing=True), CPU)
        randomize_roles(policy)
        policy(inputs).sum().backward()
        results.append(gradients(policy, "actor"))
    assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])
