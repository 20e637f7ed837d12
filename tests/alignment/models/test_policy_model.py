"""Every model role computes its output with adapters and with full weights, and no role affects another."""

from collections.abc import Callable
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model, set_peft_model_state_dict
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from alignment.config.trainer import LoRAConfig, TrainerConfig
from alignment.errors import DamagedAdapter
from alignment.models.base_model import ModelInputs, ModelRole
from alignment.models.policy_model import PolicyModel
from alignment.trainer.scoring import recompute_logprobs
from alignment.types import Sample
from tests.alignment.models.policy_model_ranks import LORA

Build = Callable[..., PolicyModel]
CPU = torch.device("cpu")
EXACT: dict[str, Any] = {"atol": 0, "rtol": 0}
with_and_without_lora = pytest.mark.parametrize("lora", [LORA, None], ids=["lora", "full"])


def transformers_logprobs(model: PreTrainedModel, inputs: ModelInputs) -> Tensor:
    with torch.no_grad():
        logits_NV = model(inputs.input_ids_BT).logits[inputs.rows_N, inputs.columns_N] / inputs.temperatures_N[:, None]
    return logits_NV.log_softmax(-1).gather(-1, inputs.targets_N[:, None])[:, 0]


def compute(policy: PolicyModel, inputs: ModelInputs, role: ModelRole) -> Tensor:
    with torch.no_grad():
        return policy(inputs, role)


@with_and_without_lora
def test_reference_is_the_base_model_while_the_actor_changes(
    build: Build, base_model: Path, inputs: ModelInputs, lora: LoRAConfig | None
) -> None:
    policy = build(lora)
    before = compute(policy, inputs, "reference")
    optimizer = torch.optim.SGD(policy.role_parameters("actor").values(), lr=0.1)
    actor = policy(inputs, "actor")
    actor.sum().backward()
    optimizer.step()
    assert not torch.allclose(compute(policy, inputs, "actor"), actor)
    torch.testing.assert_close(compute(policy, inputs, "reference"), before, **EXACT)
    base = AutoModelForCausalLM.from_pretrained(base_model)
    torch.testing.assert_close(before, transformers_logprobs(base, inputs), atol=1e-5, rtol=0)


@with_and_without_lora
def test_untrained_actor_equals_reference_and_untrained_critic_is_zero(
    build: Build, inputs: ModelInputs, lora: LoRAConfig | None
) -> None:
    policy = build(lora)
    policy.load_adapter(policy.initial_tensors("actor", 3), "actor")
    policy.load_adapter(policy.initial_tensors("critic", 3), "critic")
    torch.testing.assert_close(compute(policy, inputs, "actor"), compute(policy, inputs, "reference"), **EXACT)
    assert not compute(policy, inputs, "critic").any()


def test_actor_logprobs_match_peft(build: Build, base_model: Path, inputs: ModelInputs) -> None:
    policy = build()
    assert policy.adapter_spec is not None
    config = LoraConfig(r=LORA.r, lora_alpha=LORA.alpha, target_modules=sorted(policy.adapter_spec.target_modules))
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base_model), config)
    set_peft_model_state_dict(
        model, {name: tensor.detach() for name, tensor in policy.role_parameters("actor").items()}
    )
    torch.testing.assert_close(
        compute(policy, inputs, "actor"), transformers_logprobs(model, inputs), atol=1e-5, rtol=0
    )


@with_and_without_lora
@pytest.mark.parametrize(("trained", "untouched"), [("actor", "critic"), ("critic", "actor")])
def test_actor_and_critic_losses_do_not_touch_each_others_gradients(
    build: Build, inputs: ModelInputs, lora: LoRAConfig | None, trained: ModelRole, untouched: ModelRole
) -> None:
    policy = build(lora)
    policy(inputs, trained).sin().sum().backward()
    assert all(tensor.grad is not None and tensor.grad.any() for tensor in policy.role_parameters(trained).values())
    assert all(tensor.grad is None for tensor in policy.role_parameters(untouched).values())


def test_requires_grad_never_changes(build: Build, inputs: ModelInputs) -> None:
    policy = build()

    def trainable() -> dict[str, bool]:
        return {name: parameter.requires_grad for name, parameter in policy.named_parameters()}

    before = trainable()
    for role in policy.roles:
        policy(inputs, role)
        assert trainable() == before
    assert {name for name, on in before.items() if on} == {
        name for name in before if name.endswith((".actor", ".critic", "value_head.weight"))
    }


@with_and_without_lora
def test_loading_one_role_does_not_change_other_roles(
    build: Build, inputs: ModelInputs, lora: LoRAConfig | None
) -> None:
    policy = build(lora)
    for role in (role for role in policy.roles if role != "reference"):
        before = {other: compute(policy, inputs, other) for other in policy.roles}
        tensors = {name: tensor.detach() * 1.5 for name, tensor in policy.role_parameters(role).items()}
        policy.load_adapter(tensors, role)
        for name, tensor in policy.role_parameters(role).items():
            torch.testing.assert_close(tensor.detach(), tensors[name], **EXACT)
        # With full weights the critic reads the actor's hidden states; other roles share nothing.
        changed = {role, "critic"} if lora is None and role == "actor" else {role}
        assert {other for other in before if not torch.equal(compute(policy, inputs, other), before[other])} == changed


@with_and_without_lora
def test_logprobs_with_and_without_gradients_are_bit_identical(
    build: Build, inputs: ModelInputs, lora: LoRAConfig | None
) -> None:
    policy = build(lora)
    for role in policy.roles:
        torch.testing.assert_close(policy(inputs, role).detach(), compute(policy, inputs, role), **EXACT)


@pytest.mark.parametrize("damage", ["missing tensor", "additional tensor", "wrong shape"])
def test_mismatched_tensors_are_rejected_without_changes(build: Build, damage: str) -> None:
    policy = build()
    name = next(iter(policy.role_parameters("actor")))
    tensors = policy.initial_tensors("actor", 0)
    if damage == "missing tensor":
        del tensors[name]
    elif damage == "additional tensor":
        tensors["lm_head.weight"] = torch.zeros(1)
    else:
        tensors[name] = tensors[name][:1]  # would broadcast
    before = {name: tensor.detach().clone() for name, tensor in policy.role_parameters("actor").items()}
    with pytest.raises(DamagedAdapter, match="do not fit the actor"):
        policy.load_adapter(tensors)
    assert all(torch.equal(tensor, before[name]) for name, tensor in policy.role_parameters("actor").items())


def test_roles_that_were_not_requested_do_not_exist(base_model: Path, inputs: ModelInputs) -> None:
    policy = PolicyModel(base_model, TrainerConfig(lora=LORA), CPU)
    assert {name.rpartition(".")[2] for name, p in policy.named_parameters() if p.requires_grad} == {"actor"}
    for role in ("critic", "reward"):
        with pytest.raises(ValueError, match=f"without {role}"):
            policy(inputs, role)
        with pytest.raises(ValueError, match=f"without {role}"):
            policy.role_parameters(role)


def test_all_roles_share_one_copy_of_the_base_weights(build: Build, base_model: Path) -> None:
    policy = build(critic={"r": 8})
    base = sum(p.numel() for p in AutoModelForCausalLM.from_pretrained(base_model).parameters())
    adapters = sum(tensor.numel() for role in policy.roles for tensor in policy.role_parameters(role).values())
    assert sum(p.numel() for p in policy.parameters()) == base + adapters
    critic = {name: tuple(tensor.shape) for name, tensor in policy.role_parameters("critic").items()}
    assert critic.pop("value_head.weight") == (1, 64)
    like_the_actor = build().role_parameters("critic")  # a rank that is not set
    assert {name: tuple(tensor.shape) for name, tensor in like_the_actor.items() if "lora" in name} == {
        name: tuple(tensor.shape) for name, tensor in policy.role_parameters("actor").items()
    }
    assert {name: (8, *shape[1:]) for name, shape in critic.items() if "lora_A" in name} == {
        name: tuple(tensor.shape) for name, tensor in policy.role_parameters("critic").items() if "lora_A" in name
    }


def test_unknown_target_modules_are_rejected(base_model: Path) -> None:
    config = TrainerConfig(lora=LoRAConfig(target_modules=("qkv",)))
    with pytest.raises(ValueError, match="Qwen2ForCausalLM has no adapters on qkv"):
        PolicyModel(base_model, config, CPU)


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


def test_bfloat16_master_weights_are_float32_and_accumulate_small_steps(base_model: Path, inputs: ModelInputs) -> None:
    """A bfloat16 weight of 0.15 does not change by a step of 1e-5, because the spacing of its values is 1e-3."""
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
