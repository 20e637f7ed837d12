"""Full weights: float32 master weights, a frozen reference on request only, files that transformers reads."""

from collections.abc import Callable
from pathlib import Path
from shutil import copytree

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from alignment.config.trainer import TrainerConfig
from alignment.models.policy_model import ModelInputs, PolicyModel
from alignment.trainer.recompute_logprobs import recompute_logprobs
from alignment.types import Sample
from tests.alignment.models.test_roles import transformers_logprobs

Build = Callable[..., PolicyModel]
CPU = torch.device("cpu")


def test_actor_tensors_form_a_model_file_with_tied_weights_once(
    build: Build, base_model: Path, inputs: ModelInputs, tmp_path: Path
) -> None:
    policy = build(None)
    tensors = {name: tensor.detach().clone() for name, tensor in policy.role_parameters("actor").items()}
    assert "lm_head.weight" not in tensors
    version = copytree(base_model, tmp_path / "version")
    save_file(tensors, version / "model.safetensors", metadata={"format": "pt"})
    model = AutoModelForCausalLM.from_pretrained(version)
    torch.testing.assert_close(policy(inputs).detach(), transformers_logprobs(model, inputs), atol=1e-5, rtol=0)

    # Recomputed log-probs of a reply match that version.
    ids, start = inputs.input_ids_BT[0].tolist(), int(inputs.columns_N[0]) + 1
    first_row = inputs.rows_N == 0
    reply = Sample("turn", tuple(ids[:start]), tuple(ids[start:]), (0.0,) * int(first_row.sum()), 1.0, 1)
    (checkpointing,) = recompute_logprobs(base_model, version, [reply], device="cpu")
    untempered = inputs._replace(temperatures_N=torch.ones_like(inputs.temperatures_N))
    torch.testing.assert_close(
        torch.from_numpy(checkpointing), policy(untempered).detach()[first_row], atol=1e-5, rtol=0
    )


def test_reference_copy_exists_only_on_request(base_model: Path, inputs: ModelInputs) -> None:
    base = sum(p.numel() for p in AutoModelForCausalLM.from_pretrained(base_model).parameters())
    config = TrainerConfig(lora=None)
    with_reference = PolicyModel(base_model, config, CPU)
    without_reference = PolicyModel(base_model, config, CPU, reference=False)
    assert sum(p.numel() for p in with_reference.parameters()) == 2 * base
    assert sum(p.numel() for p in without_reference.parameters()) == base
    with pytest.raises(ValueError, match="without reference"):
        without_reference(inputs, "reference")


def test_anchor_with_full_weights_is_rejected(base_model: Path) -> None:
    with pytest.raises(ValueError, match="anchor"):
        PolicyModel(base_model, TrainerConfig(lora=None), CPU, anchor=True)


def test_bfloat16_master_weights_are_float32_and_accumulate_small_steps(base_model: Path, inputs: ModelInputs) -> None:
    """A step of 1e-5 would be rounded away from a bfloat16 weight of 0.15: neighbouring values are 1e-3 apart."""
    policy = PolicyModel(base_model, TrainerConfig(lora=None, dtype="bfloat16"), CPU)
    name, tensor = next(iter(policy.role_parameters("actor").items()))
    assert (name, tensor.dtype) == ("model.embed_tokens.weight", torch.float32)
    before, policy_before = tensor.detach().clone(), policy(inputs).detach()
    optimizer = torch.optim.Adam(policy.role_parameters("actor").values(), lr=1e-5)
    for _ in range(3):
        optimizer.zero_grad()
        policy(inputs).sum().backward()
        assert all(
            t.grad is not None and t.grad.dtype == torch.float32 for t in policy.role_parameters("actor").values()
        )
        optimizer.step()
    change = (tensor.detach() - before).abs()
    assert 1e-5 < float(change.max()) < 4e-5
    assert not torch.equal(policy(inputs).detach(), policy_before)


def test_bfloat16_master_weights_compute_like_a_bfloat16_model(base_model: Path, inputs: ModelInputs) -> None:
    policy = PolicyModel(base_model, TrainerConfig(lora=None, dtype="bfloat16"), CPU)
    torch.testing.assert_close(policy(inputs).detach(), policy(inputs, "reference"), atol=0, rtol=0)
