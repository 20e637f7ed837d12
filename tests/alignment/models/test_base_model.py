"""Log-probs for every supported architecture, and activation checkpointing, which changes no bit of a gradient."""

import json
from collections.abc import Callable
from pathlib import Path
from shutil import copytree

import pytest
import torch
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM

from alignment.config.trainer import LoRAConfig, TrainerConfig
from alignment.models.base_model import ModelInputs, ModelRole
from alignment.models.policy_model import PolicyModel
from tests.alignment.models.policy_model_ranks import LORA, draw_inputs, randomize_roles
from tests.alignment.models.test_policy_model import transformers_logprobs

CPU = torch.device("cpu")
SIZES = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "initializer_range": 0.15,
    "bos_token_id": None,
    "eos_token_id": 0,
    "pad_token_id": None,
}
# The architecture, its settings, and whether it supports an explicit attention mask.
FAMILIES = [
    ("Llama", {}, True),
    ("Llama", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}, True),
    ("Qwen2", {}, True),
    ("Qwen2", {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}, False),
    ("Qwen3", {"tie_word_embeddings": True}, True),
    ("Mistral", {"sliding_window": None}, True),
    ("Mistral", {"sliding_window": 4}, False),
    ("Gemma", {}, True),
    ("Gemma3Text", {"sliding_window": 4}, False),
    ("Granite", {"logits_scaling": 3.0}, True),
    ("Cohere", {"logit_scale": 0.5}, True),
    ("Phi", {"partial_rotary_factor": 0.5, "resid_pdrop": 0.5}, True),
]


def save_random_model(directory: Path, family: str, settings: dict[str, object]) -> Path:
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**SIZES | settings)
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    return directory


@pytest.mark.parametrize(("family", "settings", "masks"), FAMILIES)
def test_logprobs_match_transformers(
    tmp_path: Path, inputs: ModelInputs, family: str, settings: dict[str, object], masks: bool
) -> None:
    base = save_random_model(tmp_path / "base", family, settings)
    model = AutoModelForCausalLM.from_pretrained(base)
    lora_policy = PolicyModel(base, TrainerConfig(lora=LoRAConfig()), CPU)
    full_policy = PolicyModel(base, TrainerConfig(lora=None, activation_checkpointing=True), CPU, reference=False)
    for policy, role in ((lora_policy, "reference"), (lora_policy, "actor"), (full_policy, "actor")):
        torch.testing.assert_close(
            policy(inputs, role).detach(), transformers_logprobs(model, inputs), atol=1e-5, rtol=0
        )
    assert lora_policy.base_lm.supports_attention_mask == masks
    randomize_roles(lora_policy)
    assert not torch.allclose(lora_policy(inputs, "actor"), lora_policy(inputs, "reference"), atol=1e-3)


def make_branching_inputs(inputs: ModelInputs) -> tuple[ModelInputs, ModelInputs]:
    """Return two continuations of one prefix: as one row with branches, and as two rows."""
    prefix, first_suffix, second_suffix = (
        inputs.input_ids_BT[0, :4],
        inputs.input_ids_BT[1, :3],
        inputs.input_ids_BT[2, :3],
    )
    ids_BT = torch.stack([torch.cat([prefix, first_suffix]), torch.cat([prefix, second_suffix])])
    rows_N, columns_N = torch.tensor([0, 0, 1, 1]), torch.tensor([4, 5, 4, 5])
    separate = ModelInputs(ids_BT, rows_N, columns_N, ids_BT[rows_N, columns_N + 1], torch.ones(4))
    mask = torch.ones(10, 10, dtype=torch.bool).tril()
    mask[7:, 4:7] = False  # the second branch does not attend to the first
    tree = ModelInputs(
        torch.cat([prefix, first_suffix, second_suffix])[None],
        torch.zeros(4, dtype=torch.long),
        torch.tensor([4, 5, 7, 8]),
        separate.targets_N,
        torch.ones(4),
        mask[None, None],
        torch.tensor([[0, 1, 2, 3, 4, 5, 6, 4, 5, 6]]),
    )
    return tree, separate


@pytest.mark.parametrize(("family", "settings"), [(family, settings) for family, settings, masks in FAMILIES if masks])
def test_prefix_tree_row_matches_separate_rows(
    tmp_path: Path, inputs: ModelInputs, family: str, settings: dict[str, object]
) -> None:
    policy = PolicyModel(save_random_model(tmp_path, family, settings), TrainerConfig(), CPU)
    randomize_roles(policy)
    tree, separate = make_branching_inputs(inputs)
    torch.testing.assert_close(policy(tree), policy(separate), atol=1e-5, rtol=0)
    wrong_positions = tree._replace(position_ids_BT=None)
    assert not torch.allclose(policy(wrong_positions), policy(separate), atol=1e-3)


def test_prefix_tree_is_rejected_for_sliding_window_layers(tmp_path: Path, inputs: ModelInputs) -> None:
    policy = PolicyModel(save_random_model(tmp_path, "Mistral", {"sliding_window": 4}), TrainerConfig(), CPU)
    with pytest.raises(ValueError, match="window"):
        policy(make_branching_inputs(inputs)[0])


@pytest.mark.parametrize(
    ("family", "settings", "reason"),
    [
        ("Gemma2", {"final_logit_softcapping": 1.0}, "not those of its head"),
        ("GPT2", {}, "must have a list of layers"),
    ],
)
def test_unsupported_architecture_is_rejected(
    tmp_path: Path, family: str, settings: dict[str, object], reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        PolicyModel(save_random_model(tmp_path, family, settings), TrainerConfig(), CPU)


Build = Callable[..., PolicyModel]


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
        policy = build(lora, dtype=dtype, activation_checkpointing=checkpointing)
        policy(inputs, role).sin().sum().backward()
        results.append(gradients(policy, role))
    stored, recomputed = results
    assert stored.keys() == recomputed.keys() and stored
    assert all(torch.equal(stored[name], recomputed[name]) for name in stored)


def test_recomputation_uses_the_role_of_the_forward_pass(build: Build, inputs: ModelInputs) -> None:
    results = []
    for checkpointing in (False, True):
        policy = build(activation_checkpointing=checkpointing)
        loss = policy(inputs, "actor").sin().sum()
        for other_role in ("critic", "reference"):
            policy(inputs, other_role)
        loss.backward()
        results.append(gradients(policy, "actor"))
        assert all(tensor.grad is None for tensor in policy.role_parameters("critic").values())
    assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])


def test_checkpointing_stores_fewer_activations(build: Build) -> None:
    inputs, saved_bytes = draw_inputs(range(4), num_tokens=64), []
    for checkpointing in (False, True):
        policy, size = build(activation_checkpointing=checkpointing), 0

        def count(tensor: Tensor) -> Tensor:
            nonlocal size
            size += tensor.numel() * tensor.element_size()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
            policy(inputs)
        saved_bytes.append(size)
    assert saved_bytes[1] < saved_bytes[0] / 2


def test_dropout_is_disabled(base_model: Path, inputs: ModelInputs, tmp_path: Path) -> None:
    directory = copytree(base_model, tmp_path / "base")
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"attention_dropout": 0.5}))
    results = []
    for path in (base_model, directory):
        policy = PolicyModel(path, TrainerConfig(lora=LORA, activation_checkpointing=True), CPU)
        randomize_roles(policy)
        policy(inputs).sum().backward()
        results.append(gradients(policy, "actor"))
    assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])
