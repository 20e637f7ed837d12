"""Every hat is what it claims to be, and none disturbs another."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model, set_peft_model_state_dict
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from alignment.config.trainer import LoRAConfig, TrainerConfig
from alignment.errors import DamagedAdapter
from alignment.models.policy_model import ModelRole, PolicyModel, Rows
from tests.alignment.models.policy_model_ranks import LORA

Build = Callable[..., PolicyModel]
CPU = torch.device("cpu")
EXACT = {"atol": 0, "rtol": 0}
both = pytest.mark.parametrize("lora", [LORA, None], ids=["lora", "full"])


def transformers_logprobs(model: PreTrainedModel, rows: Rows) -> Tensor:
    with torch.no_grad():
        logits_NV = model(rows.ids_BT).logits[rows.rows_N, rows.columns_N] / rows.temperatures_N[:, None]
    return logits_NV.log_softmax(-1).gather(-1, rows.targets_N[:, None])[:, 0]


def said(policy: PolicyModel, rows: Rows, hat: ModelRole) -> Tensor:
    with torch.no_grad():
        return policy(rows, hat)


@both
def test_the_reference_is_the_base_model_while_the_actor_moves(
    build: Build, base_model: Path, rows: Rows, lora: LoRAConfig | None
) -> None:
    policy = build(lora)
    before = said(policy, rows, "reference")
    optimizer = torch.optim.SGD(policy.tensors("actor").values(), lr=0.1)
    actor = policy(rows, "actor")
    actor.sum().backward()
    optimizer.step()
    assert not torch.allclose(said(policy, rows, "actor"), actor)
    torch.testing.assert_close(said(policy, rows, "reference"), before, **EXACT)
    base = AutoModelForCausalLM.from_pretrained(base_model)
    torch.testing.assert_close(before, transformers_logprobs(base, rows), atol=1e-5, rtol=0)


@both
def test_a_fresh_actor_says_what_the_reference_says_and_a_fresh_critic_nothing(
    build: Build, rows: Rows, lora: LoRAConfig | None
) -> None:
    policy = build(lora)
    policy.wear(policy.fresh("actor", 3), "actor")
    policy.wear(policy.fresh("critic", 3), "critic")
    torch.testing.assert_close(said(policy, rows, "actor"), said(policy, rows, "reference"), **EXACT)
    assert not said(policy, rows, "critic").any()


def test_the_actor_says_what_peft_would_say(build: Build, base_model: Path, rows: Rows) -> None:
    policy = build()
    config = LoraConfig(r=LORA.rank, lora_alpha=LORA.alpha, target_modules=list(LORA.target_modules))
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base_model), config)
    set_peft_model_state_dict(model, {name: tensor.detach() for name, tensor in policy.tensors("actor").items()})
    torch.testing.assert_close(said(policy, rows, "actor"), transformers_logprobs(model, rows), atol=1e-5, rtol=0)


@both
@pytest.mark.parametrize(("learns", "rests"), [("actor", "critic"), ("critic", "actor")])
def test_actor_and_critic_leave_each_other_s_gradient_alone(
    build: Build, rows: Rows, lora: LoRAConfig | None, learns: ModelRole, rests: ModelRole
) -> None:
    policy = build(lora)
    policy(rows, learns).sin().sum().backward()
    assert all(tensor.grad is not None and tensor.grad.any() for tensor in policy.tensors(learns).values())
    assert all(tensor.grad is None for tensor in policy.tensors(rests).values())


def test_who_is_trained_never_changes(build: Build, rows: Rows) -> None:
    policy = build()

    def trained() -> dict[str, bool]:
        return {name: parameter.requires_grad for name, parameter in policy.named_parameters()}

    before = trained()
    for hat in policy.hats:
        policy(rows, hat)
        assert trained() == before
    assert {name for name, on in before.items() if on} == {
        name for name in before if name.endswith((".actor", ".critic", "value_head.weight"))
    }


@both
def test_a_hat_wears_what_it_is_given_and_no_other_hat_notices(
    build: Build, rows: Rows, lora: LoRAConfig | None
) -> None:
    policy = build(lora)
    for hat in (hat for hat in policy.hats if hat != "reference"):
        before = {other: said(policy, rows, other) for other in policy.hats}
        given = {name: tensor.detach() * 1.5 for name, tensor in policy.tensors(hat).items()}
        policy.wear(given, hat)
        for name, tensor in policy.tensors(hat).items():
            torch.testing.assert_close(tensor.detach(), given[name], **EXACT)
        # The critic of full weights reads the actor's hidden states; nobody else shares anything.
        moved = {hat, "critic"} if lora is None and hat == "actor" else {hat}
        assert {other for other in before if not torch.equal(said(policy, rows, other), before[other])} == moved


def test_the_anchor_in_the_actor_s_adapter_is_the_actor_and_stays_when_the_actor_leaves(
    build: Build, rows: Rows
) -> None:
    policy = build()
    policy.wear({name: tensor.detach() for name, tensor in policy.tensors("actor").items()}, "anchor")
    serving = said(policy, rows, "actor")
    torch.testing.assert_close(said(policy, rows, "anchor"), serving, **EXACT)
    policy.wear(policy.fresh("actor", 0), "actor")
    torch.testing.assert_close(said(policy, rows, "anchor"), serving, **EXACT)
    assert not policy(rows, "anchor").requires_grad


@both
def test_scoring_and_learning_see_the_same_bits(build: Build, rows: Rows, lora: LoRAConfig | None) -> None:
    policy = build(lora)
    for hat in policy.hats:
        torch.testing.assert_close(policy(rows, hat).detach(), said(policy, rows, hat), **EXACT)


@pytest.mark.parametrize("damage", ["lacks", "has more", "is of another shape"])
def test_tensors_that_do_not_fit_are_refused_and_nothing_is_worn(build: Build, damage: str) -> None:
    policy = build()
    name = next(iter(policy.tensors("actor")))
    tensors = policy.fresh("actor", 0)
    if damage == "lacks":
        del tensors[name]
    elif damage == "has more":
        tensors["lm_head.weight"] = torch.zeros(1)
    else:
        tensors[name] = tensors[name][:1]  # would broadcast
    before = {name: tensor.detach().clone() for name, tensor in policy.tensors("actor").items()}
    with pytest.raises(DamagedAdapter, match=r"The actor takes"):
        policy.wear(tensors)
    assert all(torch.equal(tensor, before[name]) for name, tensor in policy.tensors("actor").items())


def test_hats_that_were_not_asked_for_are_not_there(base_model: Path, rows: Rows) -> None:
    policy = PolicyModel(base_model, TrainerConfig(lora=LORA), CPU)
    assert {name.rpartition(".")[2] for name, p in policy.named_parameters() if p.requires_grad} == {"actor"}
    for hat in ("critic", "anchor"):
        with pytest.raises(ValueError, match=f"without {hat}"):
            policy(rows, hat)
        with pytest.raises(ValueError, match=f"without {hat}"):
            policy.tensors(hat)


def test_all_hats_together_hold_the_base_weights_once(build: Build, base_model: Path) -> None:
    policy = build()
    base = sum(p.numel() for p in AutoModelForCausalLM.from_pretrained(base_model).parameters())
    adapters = sum(tensor.numel() for hat in policy.hats for tensor in policy.tensors(hat).values())
    assert sum(p.numel() for p in policy.parameters()) == base + adapters
    critic = {name: tuple(tensor.shape) for name, tensor in policy.tensors("critic").items()}
    assert critic.pop("value_head.weight") == (1, 64)
    assert {name: (8, *shape[1:]) for name, shape in critic.items() if "lora_A" in name} == {
        name: tuple(tensor.shape) for name, tensor in policy.tensors("critic").items() if "lora_A" in name
    }


def test_an_adapter_for_no_layer_is_refused(base_model: Path) -> None:
    config = TrainerConfig(lora=LoRAConfig(target_modules=("qkv",)))
    with pytest.raises(ValueError, match="no linear layer called qkv"):
        PolicyModel(base_model, config, CPU)
