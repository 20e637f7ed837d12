"""The model families of the matrix, and a tiny random checkpoint of each, made offline with transformers' classes."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging

from tests.support.engine_model import save_tokenizer

SIZES: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
    "initializer_range": 0.2,
}
WINDOW = 16  # tokens; the sequences that are compared are longer
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 1024,
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
MLA = {
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "n_group": 1,
    "topk_group": 1,
    **EXPERTS,
}
LINEAR_ATTENTION = {
    "head_dim": 16,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}


@dataclass(frozen=True)
class Family:
    """A model family. `models` names what people know it by; `settings` are those of its configuration.

    `refused_by` and `reason`: which side cannot run it on a CPU, and a part of what that side says. The tests assert
    that it still says so: a family that begins to work must leave the list.
    """

    name: str
    models: str
    model_type: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    refused_by: str | None = None  # trainer, engine, or both, which compute different log-probs
    reason: str = ""


FAMILIES = (
    Family("llama3", "Llama 3, 3.1, 3.2", "llama", {"rope_parameters": LLAMA3_ROPE}),
    Family("qwen2", "Qwen 2, 2.5", "qwen2"),
    Family("qwen2-tied", "Qwen 2.5 up to 3B", "qwen2", {"tie_word_embeddings": True}),
    Family("qwen3", "Qwen 3", "qwen3", {"head_dim": 32}),
    Family("mistral", "Mistral from v0.2", "mistral", {"sliding_window": None, "head_dim": 16}),
    Family(
        "mistral-window",
        "Mistral v0.1",
        "mistral",
        {"sliding_window": WINDOW, "head_dim": 16},
        refused_by="both",
        reason="differ by",
    ),
    Family("ministral3", "Ministral 3", "ministral3", {"head_dim": 16}),
    Family("phi3", "Phi-3-128k, Phi-4", "phi3", {"sliding_window": None}),
    Family("phi3-window", "Phi-3-4k", "phi3", {"sliding_window": WINDOW}, refused_by="both", reason="differ by"),
    Family(
        "gemma3",
        "Gemma 3 (text)",
        "gemma3_text",
        {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": WINDOW, "tie_word_embeddings": True},
    ),
    Family("olmo2", "OLMo 2", "olmo2"),
    Family("olmo3", "OLMo 3", "olmo3", {"sliding_window": WINDOW}),
    Family(
        "granite",
        "Granite 3",
        "granite",
        {
            "embedding_multiplier": 2.0,
            "logits_scaling": 4.0,
            "residual_multiplier": 0.5,
            "attention_multiplier": 0.25,
        },
    ),
    Family("glm4", "GLM-4", "glm4", {"head_dim": 16}),
    Family("stablelm", "StableLM", "stablelm"),
    Family("starcoder2", "StarCoder2", "starcoder2", {"use_bias": True, "sliding_window": None}),
    Family(
        "cohere2",
        "Command R7B",
        "cohere2",
        {"sliding_window": WINDOW, "logit_scale": 0.25, "head_dim": 16},
        refused_by="both",
        reason="differ by",
    ),
    Family("qwen3-moe", "Qwen3-30B-A3B", "qwen3_moe", {"head_dim": 16, "num_experts": 8, **EXPERTS}),
    Family(
        "mixtral",
        "Mixtral",
        "mixtral",
        {"num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": None, "head_dim": 16},
    ),
    Family("olmoe", "OLMoE", "olmoe", {"num_key_value_heads": 4, "num_experts": 8, "num_experts_per_tok": 2}),
    Family("granite-moe", "Granite 3 MoE", "granitemoe", {"num_local_experts": 8, "num_experts_per_tok": 2}),
    Family(
        "glm4-moe",
        "GLM-4.5 to 4.7",
        "glm4_moe",
        {
            "head_dim": 16,
            "n_routed_experts": 8,
            "first_k_dense_replace": 1,
            "n_shared_experts": 1,
            "n_group": 1,
            "topk_group": 1,
            **EXPERTS,
        },
    ),
    Family("apertus", "Apertus", "apertus", refused_by="both", reason="differ by 0.002"),
    Family("smollm3", "SmolLM3", "smollm3", refused_by="engine", reason="too many values to unpack"),
    Family(
        "ernie",
        "ERNIE 4.5 (dense)",
        "ernie4_5",
        {"head_dim": 16},
        refused_by="engine",
        reason="too many values to unpack",
    ),
    Family(
        "seed-oss", "Seed-OSS", "seed_oss", {"head_dim": 16}, refused_by="engine", reason="too many values to unpack"
    ),
    Family(
        "hunyuan", "Hunyuan (dense)", "hunyuan_v1_dense", {"head_dim": 16}, refused_by="engine", reason="key_layernorm"
    ),
    Family(
        "phi", "Phi-1, Phi-2", "phi", {"num_key_value_heads": 4}, refused_by="engine", reason="exceeds dimension size"
    ),
    Family("nemotron", "Nemotron", "nemotron", refused_by="engine", reason="no SGlang implementation"),
    Family(
        "gemma2",
        "Gemma 2",
        "gemma2",
        {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": WINDOW, "tie_word_embeddings": True},
        refused_by="trainer",
        reason="it caps them",
    ),
    Family(
        "qwen2-moe",
        "Qwen1.5-MoE, Qwen2-57B-A14B",
        "qwen2_moe",
        {"num_experts": 8, "shared_expert_intermediate_size": 64, **EXPERTS},
        refused_by="engine",
        reason="0 active drivers",
    ),
    Family(
        "gpt-oss",
        "GPT-OSS",
        "gpt_oss",
        {"head_dim": 16, "num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": WINDOW},
        refused_by="trainer",
        reason="does not support an attention implementation",
    ),
    Family(
        "exaone4",
        "EXAONE 4",
        "exaone4",
        {"head_dim": 16, "sliding_window": WINDOW},
        refused_by="engine",
        reason="attention backends",
    ),
    Family("deepseek-v3", "DeepSeek V3, R1", "deepseek_v3", MLA, refused_by="engine", reason="AssertionError"),
    Family(
        "lfm2",
        "LFM2",
        "lfm2",
        {"layer_types": ["conv", "full_attention", "conv", "full_attention"]},
        refused_by="engine",
        reason="0 active drivers",
    ),
    Family(
        "qwen3-next",
        "Qwen3-Next",
        "qwen3_next",
        {"num_experts": 8, "shared_expert_intermediate_size": 32, **EXPERTS, **LINEAR_ATTENTION},
        refused_by="engine",
        reason="full_attention_interval",
    ),
    Family(
        "qwen3.5",
        "Qwen 3.5 (text)",
        "qwen3_5_text",
        LINEAR_ATTENTION,
        refused_by="engine",
        reason="full_attention_interval",
    ),
)
BY_NAME = {family.name: family for family in FAMILIES}


def build(family: Family, folder: Path) -> Path:
    """Write a random checkpoint of about 0.3 M parameters with a tokenizer, and return its folder.

    Norms and biases are random too: with their usual ones and zeros a side that leaves them out would agree.
    """
    logging.set_verbosity_error()
    torch.manual_seed(0)
    config = AutoConfig.for_model(family.model_type, **SIZES | dict(family.settings))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1 and ("norm" in name or "bias" in name):
                parameter.add_(torch.randn_like(parameter) * 0.05)
            elif "sinks" in name:
                parameter.normal_()
    model.save_pretrained(folder)
    save_tokenizer(folder)
    return folder
