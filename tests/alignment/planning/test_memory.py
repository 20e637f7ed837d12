"""The planner's formulas against the peaks of the trainer's own model on fake tensors, and against published ones."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from alignment.artifacts.model_spec import ModelSpec
from alignment.artifacts.specs import AdapterSpec
from alignment.config.trainer import LoRAConfig
from alignment.models.describe import describe_folder
from alignment.planning.hardware import GIB
from alignment.planning.memory import (
    ADAPTER_STATE_BYTES,
    UpdateShape,
    adapter_parameters,
    kv_bytes_per_token,
    slot_bytes,
    update_memory,
)

CONFIGS = {
    "llama-8b": {
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
    },
    "llama-70b": {
        "model_type": "llama",
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
    },
    "qwen2.5-7b": {
        "model_type": "qwen2",
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "vocab_size": 152064,
    },
    "qwen3-4b": {
        "model_type": "qwen3",
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
    },
    "qwen3-30b-a3b": {
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "vocab_size": 151936,
    },
}


def write_config(folder: Path, name: str, layers: int | None = None) -> Path:
    fields = {"tie_word_embeddings": False, "max_position_embeddings": 131072, **CONFIGS[name]}
    (folder / "config.json").write_text(json.dumps(fields | ({"num_hidden_layers": layers} if layers else {})))
    return folder


def describe(folder: Path, name: str, rank: int, layers: int | None = None) -> tuple[ModelSpec, AdapterSpec]:
    model = describe_folder(write_config(folder, name, layers))
    return model, AdapterSpec.from_model(model, LoRAConfig(r=rank, alpha=2 * rank))


def simulate(folder: Path, shape: UpdateShape, rank: int) -> dict[str, float]:
    case = {
        "folder": str(folder),
        "ranks": shape.shards,
        "tokens": shape.micro_batch_tokens,
        "scored": shape.micro_batch_tokens // 2,
        "rank": rank,
        "checkpointing": shape.activation_checkpointing,
        "logits_chunk": shape.logits_chunk,
    }
    command = [sys.executable, "-m", "tests.alignment.planning.simulate", json.dumps(case)]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[3]), "OMP_NUM_THREADS": "1"}
    output = subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout
    measured: dict[str, float] = json.loads(output)
    return measured


@pytest.mark.parametrize(
    ("name", "layers", "rank", "shape"),
    [
        ("llama-8b", 4, 16, UpdateShape(8, 8192, True)),
        pytest.param("llama-8b", 4, 16, UpdateShape(8, 8192, False), marks=pytest.mark.slow),
        pytest.param("llama-8b", 2, 64, UpdateShape(8, 4096, False), marks=pytest.mark.slow),
        pytest.param("llama-70b", 2, 16, UpdateShape(64, 8192, True), marks=pytest.mark.slow),
        pytest.param("qwen2.5-7b", 3, 16, UpdateShape(2, 4096, True), marks=pytest.mark.slow),
        pytest.param("qwen3-4b", 2, 16, UpdateShape(8, 8192, True), marks=pytest.mark.slow),
        pytest.param("qwen3-4b", 2, 16, UpdateShape(8, 8192, False), marks=pytest.mark.slow),
        pytest.param("llama-8b", None, 16, UpdateShape(8, 8192, True), marks=pytest.mark.slow),
        # All of its 80 layers take more than ten minutes of one core.
        pytest.param("llama-70b", 12, 16, UpdateShape(64, 8192, True), marks=pytest.mark.slow),
    ],
)
def test_peak_is_that_of_the_trainers_model_on_fake_tensors(
    tmp_path: Path, name: str, layers: int | None, rank: int, shape: UpdateShape
) -> None:
    model, spec = describe(tmp_path, name, rank, layers)
    assert sum(update_memory(model, spec, shape).values()) == pytest.approx(
        simulate(tmp_path, shape, rank)["total"], rel=0.05
    )


# Peaks in GiB that prime-rl publishes (BENCHMARKS.md; LoRA of rank 16, full activation checkpointing). It keeps its
# shards in float32, so that weights are gathered, as copies in bfloat16, also on one GPU.
PRIME_RL = [
    ("qwen3-4b", 1, 16384, 23.30),
    ("qwen3-4b", 8, 16384, 10.26),
    ("qwen3-4b", 1, 65536, 41.99),
    ("qwen3-4b", 8, 65536, 28.85),
    ("qwen3-30b-a3b", 8, 16384, 31.65),
    ("qwen3-30b-a3b", 8, 65536, 63.68),
]


@pytest.mark.parametrize(("name", "gpus", "tokens", "published"), PRIME_RL)
def test_peak_is_within_a_tenth_of_published_ones(
    tmp_path: Path, name: str, gpus: int, tokens: int, published: float
) -> None:
    model, spec = describe(tmp_path, name, rank=16)
    memory = update_memory(model, spec, UpdateShape(gpus, tokens, activation_checkpointing=True))
    gathered = update_memory(model, spec, UpdateShape(8, tokens, activation_checkpointing=True))["gathered weights"]
    in_float32 = memory | {"weights": 2 * memory["weights"], "gathered weights": gathered}
    if model.experts:  # its adapters are on the three matrices of each expert too
        on_experts = model.num_layers * 3 * 128 * (2048 + 768) * 16
        in_float32["adapters and optimizer"] += ADAPTER_STATE_BYTES * on_experts / gpus
    assert sum(in_float32.values()) / GIB == pytest.approx(published, rel=0.10)


def test_sizes_that_are_known(tmp_path: Path) -> None:
    """Counted by hand from the published shapes; the slots and the cache are those of SGLang's own memory pools."""
    model, spec = describe(tmp_path, "llama-8b", rank=16)
    assert model.parameters == 8_030_261_248
    assert adapter_parameters(spec) == 32 * 16 * (2 * (4096 + 4096) + 2 * (4096 + 1024) + 3 * (4096 + 14336))
    assert kv_bytes_per_token(model, 1) == 131_072 and kv_bytes_per_token(model, 8) == 16_384
    assert kv_bytes_per_token(model, 16) == 16_384  # more GPUs than heads hold them twice
    assert slot_bytes(model, spec, 1) == 2 * adapter_parameters(spec)
    assert slot_bytes(model, spec, 8) < slot_bytes(model, spec, 1) / 2
    experts, _ = describe(tmp_path, "qwen3-30b-a3b", rank=16)
    assert experts.parameters == pytest.approx(30.5e9, rel=0.01)
    assert experts.matmul_parameters == pytest.approx(3.0e9, rel=0.05)


def test_replicated_weights_are_not_gathered_and_float32_takes_twice(tmp_path: Path) -> None:
    model, spec = describe(tmp_path, "llama-8b", rank=16)
    replicated = update_memory(model, spec, UpdateShape(1, 8192, True))
    assert replicated["gathered weights"] == 0 and replicated["weights"] == 2 * model.parameters
    wide = update_memory(model, spec, replace(UpdateShape(1, 8192, True), dtype="float32"))
    assert wide["weights"] == 2 * replicated["weights"]
    assert wide["adapters and optimizer"] == replicated["adapters and optimizer"]
    critic = update_memory(model, spec, UpdateShape(1, 8192, True, adapters=2))
    assert critic["adapters and optimizer"] == 2 * replicated["adapters and optimizer"]
