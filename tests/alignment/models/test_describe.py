"""The walk over a model: linear layers, experts, buffers, windows and sizes, from a config.json alone."""

import json
from pathlib import Path

import pytest
import torch
import transformers

from alignment.artifacts.model_spec import ModelSpec
from alignment.artifacts.specs import AdapterSpec
from alignment.config.trainer import LoRAConfig
from alignment.models.describe import build_on_meta, describe, describe_folder

SIZES = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
}
DENSE = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
ATTENTION = DENSE[:4]
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


def write_config(folder: Path, family: str, **settings: object) -> Path:
    getattr(transformers, f"{family}Config")(**SIZES | settings).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("family", "settings", "targets"),
    [
        ("Llama", {}, DENSE),
        ("Qwen2", {"tie_word_embeddings": True}, DENSE),
        ("Phi3", {}, ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")),
        ("Glm4", {}, (*ATTENTION, "gate_up_proj", "down_proj")),
        ("Starcoder2", {}, ATTENTION),  # its MLP is of layers that engines do not adapt: c_fc, c_proj
        ("Phi", {}, ATTENTION[:3]),
        ("Apertus", {}, (*ATTENTION, "down_proj")),  # without a gate, which engines fuse up_proj with
        ("Qwen3Moe", EXPERTS, ATTENTION),
        ("Qwen2Moe", {**EXPERTS, "shared_expert_intermediate_size": 64}, ATTENTION),
        ("Mixtral", {"num_local_experts": 8}, ATTENTION),
    ],
)
def test_target_modules_are_what_an_engine_can_adapt(
    tmp_path: Path, family: str, settings: dict[str, object], targets: tuple[str, ...]
) -> None:
    model = describe_folder(write_config(tmp_path, family, **settings))
    assert set(model.target_modules) == set(targets)
    spec = AdapterSpec.from_model(model, LoRAConfig(r=4))
    assert spec.target_modules == set(targets)
    assert len(spec.module_paths) == len(targets) * 2  # two layers
    assert not any("router" in path or "expert" in path for path in spec.module_paths)


@pytest.mark.parametrize("family", ["Llama", "Qwen3", "Gemma3Text", "Qwen3Moe", "GraniteMoe", "Glm4Moe"])
@pytest.mark.parametrize("tied", [False, True])
def test_walk_on_meta_finds_what_the_loaded_model_holds(tmp_path: Path, family: str, tied: bool) -> None:
    experts = EXPERTS | {"num_local_experts": 8, "n_routed_experts": 8, "n_group": 1, "topk_group": 1}
    write_config(tmp_path, family, tie_word_embeddings=tied, **(experts if "Moe" in family else {}))
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_config(config)
    from_config = describe_folder(tmp_path)
    assert from_config == describe(loaded)
    assert from_config.parameters == sum(parameter.numel() for parameter in loaded.parameters())
    assert from_config.tied_embeddings == tied
    assert from_config == ModelSpec.from_json(from_config.to_json())
    sizes = from_config.embedding_parameters + from_config.head_parameters + sum(from_config.units.values())
    assert from_config.parameters - sizes == config.hidden_size  # the last norm
    assert all(parameter.is_meta for parameter in build_on_meta(tmp_path, torch.bfloat16).parameters())


def test_experts_that_a_token_is_not_routed_to_are_not_counted_as_computation(tmp_path: Path) -> None:
    model = describe_folder(write_config(tmp_path, "Qwen3Moe", **EXPERTS))
    one_expert = 3 * 64 * 32
    assert model.num_experts == 8 and model.experts_per_token == 2
    assert sum(weights.parameters for weights in model.experts) == 2 * 8 * one_expert
    assert model.inactive_parameters == 2 * 6 * one_expert
    assert model.matmul_parameters == model.parameters - model.embedding_parameters - 2 * 6 * one_expert


@pytest.mark.parametrize(
    ("family", "settings", "windows"),
    [
        ("Llama", {}, (None, None)),
        ("Mistral", {"sliding_window": 16}, (16, 16)),
        ("Phi3", {"sliding_window": 16}, (16, 16)),
        ("Gemma3Text", {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]}, (16, None)),
        ("Qwen2", {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}, (None, 4)),
        ("Qwen2", {"use_sliding_window": False, "sliding_window": 4}, (None, None)),
    ],
)
def test_windows_of_attention(
    tmp_path: Path, family: str, settings: dict[str, object], windows: tuple[int | None, ...]
) -> None:
    assert describe_folder(write_config(tmp_path, family, **settings)).windows == windows


def test_buffers_that_no_file_holds(tmp_path: Path) -> None:
    model = describe_folder(write_config(tmp_path, "Gemma3Text"))
    assert {buffer.path for buffer in model.buffers if not buffer.is_persistent} >= {"model.embed_tokens.embed_scale"}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{"model_type": "chatglm9"}', "holds no configuration of a model that transformers knows"),
        ("{}", "holds no configuration of a model that transformers knows"),
        (json.dumps({"model_type": "gpt2"}), "GPT2LMHeadModel is not supported"),
    ],
)
def test_unknown_configuration_is_refused(tmp_path: Path, text: str, reason: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=reason):
        describe_folder(tmp_path)
