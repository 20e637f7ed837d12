"""The adapter that a base model needs, and the check of names, shapes, dtypes and values before an engine loads one.

An engine accepts an adapter of the wrong shape and crashes at its first use, and generates nonsense from one with NaN
values. Every adapter must pass `check_adapter` before an engine loads it. The check needs numpy only.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np

from alignment.artifacts import tensor_files
from alignment.config.trainer import LoRAConfig
from alignment.errors import DamagedAdapter

ADAPTER = "adapter_model.safetensors"
ADAPTER_CONFIG = "adapter_config.json"
# Untrained adapters have a root mean square of about 0.04, trained ones stay below 1; 10 outweighs the base model.
MAX_RMS = 10.0


@dataclass(frozen=True)
class AdapterSpec:
    """The adapter that a base model needs: rank, alpha, target modules, and the shape of every tensor.

    Example: shapes["base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"] == (8, 256)
    """

    rank: int
    alpha: int
    target_modules: frozenset[str]
    shapes: dict[str, tuple[int, int]]

    @classmethod
    def from_base_model(cls, base_model: Path, lora: LoRAConfig) -> Self:
        """Derive the specification from the base model's config.json (decoders with the layout of Llama and Qwen).

        Raises ValueError for target modules that the layout does not have.
        """
        config = json.loads((base_model / "config.json").read_text())
        hidden, inner = config["hidden_size"], config["intermediate_size"]
        heads = config["num_attention_heads"]
        head_dim = config.get("head_dim") or hidden // heads
        queries, keys = heads * head_dim, config.get("num_key_value_heads", heads) * head_dim
        dimensions = {
            "self_attn.q_proj": (hidden, queries),
            "self_attn.k_proj": (hidden, keys),
            "self_attn.v_proj": (hidden, keys),
            "self_attn.o_proj": (queries, hidden),
            "mlp.gate_proj": (hidden, inner),
            "mlp.up_proj": (hidden, inner),
            "mlp.down_proj": (inner, hidden),
        }
        unknown = set(lora.target_modules) - {path.partition(".")[2] for path in dimensions}
        if unknown:
            raise ValueError(f"LoRA target modules are not supported: {', '.join(sorted(unknown))}.")
        shapes: dict[str, tuple[int, int]] = {}
        for layer in range(config["num_hidden_layers"]):
            for path, (width_in, width_out) in dimensions.items():
                if path.partition(".")[2] in lora.target_modules:
                    name = f"base_model.model.model.layers.{layer}.{path}"
                    shapes[f"{name}.lora_A.weight"] = (lora.rank, width_in)
                    shapes[f"{name}.lora_B.weight"] = (width_out, lora.rank)
        return cls(lora.rank, lora.alpha, frozenset(lora.target_modules), shapes)


def check_adapter(directory: Path, expected: AdapterSpec) -> None:
    """Raise DamagedAdapter, with the reason, if an engine must not load the adapter in `directory`."""
    _check_config(directory / ADAPTER_CONFIG, expected)
    values = dict(tensor_files.read_tensors(directory / ADAPTER, expected.shapes))
    for name, tensor in values.items():
        if not np.isfinite(tensor).all():
            raise DamagedAdapter(f"{name} holds values that are not finite.")
        rms = float(np.sqrt(np.square(tensor, dtype=np.float64).mean()))
        if rms > MAX_RMS:
            raise DamagedAdapter(f"{name} has a root mean square of {rms:.3g}; the limit is {MAX_RMS:g}.")
        # A starts random, so a row of zeros was never written; B starts as zeros, but in all layers together.
        if name.endswith("lora_A.weight") and not tensor.any(axis=1).all():
            raise DamagedAdapter(f"{name} has a row of zeros, as a truncated file does.")
    untrained = {name for name in values if name.endswith("lora_B.weight") and not values[name].any()}
    if untrained and 2 * len(untrained) < len(values):
        raise DamagedAdapter(f"{min(untrained)} is all zeros while other tensors are trained.")


def _check_config(path: Path, expected: AdapterSpec) -> None:
    try:
        config = json.loads(path.read_bytes())
        actual = {
            "r": config["r"],
            "lora_alpha": config["lora_alpha"],
            "target_modules": set(config["target_modules"]),
        }
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DamagedAdapter(f"{path} is not a readable adapter configuration.") from error
    required = {"r": expected.rank, "lora_alpha": expected.alpha, "target_modules": expected.target_modules}
    for key, value in required.items():
        if actual[key] != value:
            raise DamagedAdapter(f"{path} says {key} is {actual[key]}; the engine serves {value}.")
    for key in ("use_dora", "use_rslora", "modules_to_save", "rank_pattern", "alpha_pattern"):
        if config.get(key):
            raise DamagedAdapter(f"{path} sets {key}, which the engine ignores or rejects.")
