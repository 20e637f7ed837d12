"""Whatever is laid out as Llama and Qwen are gives transformers' own log-probs; what is not is refused."""

from pathlib import Path

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from alignment.config.trainer import LoRAConfig, TrainerConfig
from alignment.models.policy_model import PolicyModel, Rows
from tests.alignment.models.policy_model_ranks import dress
from tests.alignment.models.test_roles import transformers_logprobs

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
# Name of the architecture, settings of its own, and whether its rows may have a mask of their own.
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
    ("Phi", {"partial_rotary_factor": 0.5, "resid_pdrop": 0.5}, True),
]


def make(directory: Path, family: str, settings: dict[str, object]) -> Path:
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**SIZES | settings)
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    return directory


@pytest.mark.parametrize(("family", "settings", "masks"), FAMILIES)
def test_logprobs_are_those_of_transformers(
    tmp_path: Path, rows: Rows, family: str, settings: dict[str, object], masks: bool
) -> None:
    base = make(tmp_path / "base", family, settings)
    model = AutoModelForCausalLM.from_pretrained(base)
    adapted = PolicyModel(base, TrainerConfig(lora=LoRAConfig()), CPU)
    full = PolicyModel(base, TrainerConfig(lora=None, gradient_checkpointing=True), CPU, reference=False)
    for policy, hat in ((adapted, "reference"), (adapted, "actor"), (full, "actor")):
        torch.testing.assert_close(policy(rows, hat).detach(), transformers_logprobs(model, rows), atol=1e-5, rtol=0)
    assert adapted.masks_allowed == masks
    dress(adapted)
    assert not torch.allclose(adapted(rows, "actor"), adapted(rows, "reference"), atol=1e-3)


def fork(rows: Rows) -> tuple[Rows, Rows]:
    """Two continuations of one beginning: as one row that is a tree, and as two rows."""
    stem, left, right = rows.ids_BT[0, :4], rows.ids_BT[1, :3], rows.ids_BT[2, :3]
    ids_BT = torch.stack([torch.cat([stem, left]), torch.cat([stem, right])])
    rows_N, columns_N = torch.tensor([0, 0, 1, 1]), torch.tensor([4, 5, 4, 5])
    apart = Rows(ids_BT, rows_N, columns_N, ids_BT[rows_N, columns_N + 1], torch.ones(4))
    mask = torch.ones(10, 10, dtype=torch.bool).tril()
    mask[7:, 4:7] = False  # the right branch does not see the left one
    tree = Rows(
        torch.cat([stem, left, right])[None],
        torch.zeros(4, dtype=torch.long),
        torch.tensor([4, 5, 7, 8]),
        apart.targets_N,
        torch.ones(4),
        mask[None, None],
        torch.tensor([[0, 1, 2, 3, 4, 5, 6, 4, 5, 6]]),
    )
    return tree, apart


@pytest.mark.parametrize(("family", "settings"), [(family, own) for family, own, masks in FAMILIES if masks])
def test_a_row_may_be_a_tree(tmp_path: Path, rows: Rows, family: str, settings: dict[str, object]) -> None:
    policy = PolicyModel(make(tmp_path, family, settings), TrainerConfig(), CPU)
    dress(policy)
    tree, apart = fork(rows)
    torch.testing.assert_close(policy(tree), policy(apart), atol=1e-5, rtol=0)
    astray = tree._replace(positions_BT=None)
    assert not torch.allclose(policy(astray), policy(apart), atol=1e-3)


def test_a_tree_is_refused_where_layers_look_at_a_window(tmp_path: Path, rows: Rows) -> None:
    policy = PolicyModel(make(tmp_path, "Mistral", {"sliding_window": 4}), TrainerConfig(), CPU)
    with pytest.raises(ValueError, match="window"):
        policy(fork(rows)[0])


@pytest.mark.parametrize(
    ("family", "settings", "reason"),
    [
        ("Gemma2", {"final_logit_softcapping": 1.0}, "not those of its head"),
        ("Granite", {"logits_scaling": 3.0}, "not those of its head"),
        ("GPT2", {}, "not laid out"),
    ],
)
def test_a_model_that_would_be_computed_wrongly_is_refused(
    tmp_path: Path, family: str, settings: dict[str, object], reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        PolicyModel(make(tmp_path, family, settings), TrainerConfig(), CPU)
