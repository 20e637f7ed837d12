"""Training without an adapter: float32 masters, a frozen reference only on request, files that transformers reads."""

from collections.abc import Callable
from pathlib import Path
from shutil import copytree

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from alignment.config.trainer import TrainerConfig
from alignment.models.policy_model import PolicyModel, Rows
from alignment.trainer.recompute_logprobs import recompute_logprobs
from alignment.types import Sample
from tests.alignment.models.test_roles import transformers_logprobs

Build = Callable[..., PolicyModel]
CPU = torch.device("cpu")


def test_its_tensors_are_a_model_file_with_tied_weights_once(
    build: Build, base_model: Path, rows: Rows, tmp_path: Path
) -> None:
    policy = build(None)
    tensors = {name: tensor.detach().clone() for name, tensor in policy.tensors("actor").items()}
    assert "lm_head.weight" not in tensors
    version = copytree(base_model, tmp_path / "version")
    save_file(tensors, version / "model.safetensors", metadata={"format": "pt"})
    model = AutoModelForCausalLM.from_pretrained(version)
    torch.testing.assert_close(policy(rows).detach(), transformers_logprobs(model, rows), atol=1e-5, rtol=0)

    # And a reply of that version attests to it.
    ids, start = rows.ids_BT[0].tolist(), int(rows.columns_N[0]) + 1
    wanted = rows.rows_N == 0
    reply = Sample("turn", tuple(ids[:start]), tuple(ids[start:]), (0.0,) * int(wanted.sum()), 1.0, 1)
    (again,) = recompute_logprobs(base_model, version, [reply], device="cpu")
    calm = rows._replace(temperatures_N=torch.ones_like(rows.temperatures_N))
    torch.testing.assert_close(torch.from_numpy(again), policy(calm).detach()[wanted], atol=1e-5, rtol=0)


def test_the_second_copy_is_there_only_on_request(base_model: Path, rows: Rows) -> None:
    base = sum(p.numel() for p in AutoModelForCausalLM.from_pretrained(base_model).parameters())
    config = TrainerConfig(lora=None)
    with_one = PolicyModel(base_model, config, CPU)
    without = PolicyModel(base_model, config, CPU, reference=False)
    assert sum(p.numel() for p in with_one.parameters()) == 2 * base
    assert sum(p.numel() for p in without.parameters()) == base
    with pytest.raises(ValueError, match="without reference"):
        without(rows, "reference")


def test_an_anchor_is_refused(base_model: Path) -> None:
    with pytest.raises(ValueError, match="anchor"):
        PolicyModel(base_model, TrainerConfig(lora=None), CPU, anchor=True)


def test_in_bfloat16_masters_stay_float32_and_small_steps_add_up(base_model: Path, rows: Rows) -> None:
    """A step of 1e-5 is lost on a bfloat16 weight of 0.15, whose neighbours are 1e-3 apart."""
    policy = PolicyModel(base_model, TrainerConfig(lora=None, dtype="bfloat16"), CPU)
    name, tensor = next(iter(policy.tensors("actor").items()))
    assert (name, tensor.dtype) == ("model.embed_tokens.weight", torch.float32)
    before, policy_before = tensor.detach().clone(), policy(rows).detach()
    optimizer = torch.optim.Adam(policy.tensors("actor").values(), lr=1e-5)
    for _ in range(3):
        optimizer.zero_grad()
        policy(rows).sum().backward()
        assert all(t.grad is not None and t.grad.dtype == torch.float32 for t in policy.tensors("actor").values())
        optimizer.step()
    moved = (tensor.detach() - before).abs()
    assert 1e-5 < float(moved.max()) < 4e-5
    assert not torch.equal(policy(rows).detach(), policy_before)


def test_in_bfloat16_it_computes_what_the_bfloat16_model_computes(base_model: Path, rows: Rows) -> None:
    policy = PolicyModel(base_model, TrainerConfig(lora=None, dtype="bfloat16"), CPU)
    torch.testing.assert_close(policy(rows).detach(), policy(rows, "reference"), atol=0, rtol=0)
