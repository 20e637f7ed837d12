"""What an engine may be given: names, shapes, types and values of an adapter, read with numpy alone.

An engine takes a wrong-shaped adapter without a word and dies at its first use, and answers nonsense from one
with NaN in it, so nothing reaches an engine that has not passed here.
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
# Adapters start with a root mean square of about 0.04 and stay below 1; 10 drowns the base model.
MAX_RMS = 10.0


@dataclass(frozen=True)
class AdapterSpec:
    """The adapter a base model takes: its scale and every tensor with its shape.

    Example: shapes["base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"] == (8, 256)
    """

    rank: int
    alpha: int
    target_modules: frozenset[str]
    shapes: dict[str, tuple[int, int]]

    @classmethod
    def of(cls, base_model: Path, lora: LoRAConfig) -> Self:
        """Derive it from the base model's config.json (decoders laid out as in Llama and Qwen)."""
        config = json.loads((base_model / "config.json").read_text())
        hidden, inner = config["hidden_size"], config["intermediate_size"]
        heads = config["num_attention_heads"]
        head_dim = config.get("head_dim") or hidden // heads
        queries, keys = heads * head_dim, config.get("num_key_value_heads", heads) * head_dim
        sides = {
            "self_attn.q_proj": (hidden, queries),
            "self_attn.k_proj": (hidden, keys),
            "self_attn.v_proj": (hidden, keys),
            "self_attn.o_proj": (queries, hidden),
            "mlp.gate_proj": (hidden, inner),
            "mlp.up_proj": (hidden, inner),
            "mlp.down_proj": (inner, hidden),
        }
        unknown = set(lora.target_modules) - {path.partition(".")[2] for path in sides}
        if unknown:
            raise ValueError(f"No adapter can be put on {', '.join(sorted(unknown))}.")
        shapes: dict[str, tuple[int, int]] = {}
        for layer in range(config["num_hidden_layers"]):
            for path, (width_in, width_out) in sides.items():
                if path.partition(".")[2] in lora.target_modules:
                    name = f"base_model.model.model.layers.{layer}.{path}"
                    shapes[f"{name}.lora_A.weight"] = (lora.rank, width_in)
                    shapes[f"{name}.lora_B.weight"] = (width_out, lora.rank)
        return cls(lora.rank, lora.alpha, frozenset(lora.target_modules), shapes)


def check_adapter(directory: Path, expected: AdapterSpec) -> None:
    """Refuse, with a sentence, an adapter that the engine must not see."""
    _check_config(directory / ADAPTER_CONFIG, expected)
    values = dict(tensor_files.read(directory / ADAPTER, expected.shapes))
    for name, tensor in values.items():
        if not np.isfinite(tensor).all():
            raise DamagedAdapter(f"{name} holds values that are not finite.")
        rms = float(np.sqrt(np.square(tensor, dtype=np.float64).mean()))
        if rms > MAX_RMS:
            raise DamagedAdapter(f"{name} has a root mean square of {rms:.3g}; {MAX_RMS:g} is the bound.")
        # A begins random, so a row of zeros was never computed; B begins as zeros, but all of it together.
        if name.endswith("lora_A.weight") and not tensor.any(axis=1).all():
            raise DamagedAdapter(f"{name} has a row of zeros, as a file cut short leaves it.")
    blank = {name for name in values if name.endswith("lora_B.weight") and not values[name].any()}
    if blank and 2 * len(blank) < len(values):
        raise DamagedAdapter(f"{min(blank)} is all zeros while others are trained.")


def _check_config(path: Path, expected: AdapterSpec) -> None:
    try:
        config = json.loads(path.read_bytes())
        stated = {
            "r": config["r"],
            "lora_alpha": config["lora_alpha"],
            "target_modules": set(config["target_modules"]),
        }
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DamagedAdapter(f"{path} cannot be read as an adapter's configuration.") from error
    wanted = {"r": expected.rank, "lora_alpha": expected.alpha, "target_modules": expected.target_modules}
    for key, value in wanted.items():
        if stated[key] != value:
            raise DamagedAdapter(f"{path} says {key} is {stated[key]}; the engine serves {value}.")
    for key in ("use_dora", "use_rslora", "modules_to_save", "rank_pattern", "alpha_pattern"):
        if config.get(key):
            raise DamagedAdapter(f"{path} sets {key}, which the engine would ignore or refuse.")
