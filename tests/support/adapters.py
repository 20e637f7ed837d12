"""A sealed adapter for the base model of a test, and the specification of its adapters."""

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from alignment.artifacts.manifest import write_manifest
from alignment.artifacts.specs import ADAPTER, ADAPTER_CONFIG, AdapterSpec
from alignment.config.trainer import LoRAConfig
from alignment.models.describe import describe_folder


def adapter_spec(base_model: Path, lora: LoRAConfig | None = None) -> AdapterSpec:
    """Return the spec of the adapters of a base model, from its config.json."""
    return AdapterSpec.from_model(describe_folder(base_model), lora or LoRAConfig())


def make_adapter(directory: Path, base_model: Path, seed: int = 0, lora: LoRAConfig | None = None) -> str:
    """Write a small random adapter that fits `base_model`. Returns the manifest's SHA-256."""
    lora, rng = lora or LoRAConfig(), np.random.default_rng(seed)
    directory.mkdir(parents=True)
    spec = adapter_spec(base_model, lora)
    save_file(
        {name: rng.normal(0, 0.02, shape).astype(np.float32) for name, shape in spec.shapes.items()},
        directory / ADAPTER,
    )
    config = {
        "peft_type": "LORA",
        "r": lora.r,
        "lora_alpha": lora.alpha,
        "target_modules": sorted(spec.target_modules),
        "base_model_name_or_path": str(base_model),
    }
    (directory / ADAPTER_CONFIG).write_text(json.dumps(config))
    return write_manifest(directory, {"made": "for a test"})
