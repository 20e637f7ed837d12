"""Reward model files, with a manifest like that of a version.

adapter_model.safetensors   adapter_config.json    the adapter; not with full weights
head.safetensors                                   the head's weight and bias
reward_model.json                                  the calibration from score to reward, and the metrics
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from alignment.artifacts import ADAPTER, AdapterSpec, check_adapter, verify
from alignment.config.trainer import LoRAConfig
from alignment.errors import DamagedAdapter
from alignment.functional import PlattScaling
from alignment.models import lora as model_lora
from alignment.models.policy_model import REWARD_HEAD

HEAD = "head.safetensors"
METADATA = "reward_model.json"


@dataclass(frozen=True)
class RewardModelState:
    """Full tensors by name, the calibration from score to probability, and the metrics of the fit."""

    tensors: dict[str, Tensor]
    platt: PlattScaling
    metrics: dict[str, Any]


def write(directory: Path, state: RewardModelState, lora: LoRAConfig | None, base_model: Path) -> None:
    """Write a reward model into an empty directory. `lora` is None for full weights."""
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in state.tensors.items()}
    head = {name: tensor for name, tensor in tensors.items() if name.startswith(REWARD_HEAD)}
    save_file(head, directory / HEAD)
    if lora is not None:
        save_file({name: tensor for name, tensor in tensors.items() if name not in head}, directory / ADAPTER)
        model_lora.write_config(directory, lora, base_model)
    metadata = {"platt": state.platt._asdict(), "metrics": state.metrics}
    (directory / METADATA).write_text(json.dumps(metadata, indent=1, sort_keys=True, allow_nan=False))


def read(directory: Path, sha256: str, spec: AdapterSpec | None) -> RewardModelState:
    """Return the reward model in a directory. `spec` is None for full weights.

    Raises DamagedAdapter if the directory does not match the manifest with this hash or does not fit the base model.
    """
    verify(directory, sha256)
    tensors: dict[str, Tensor] = load_file(directory / HEAD)
    if spec is not None:
        check_adapter(directory, spec)
        tensors |= load_file(directory / ADAPTER)
    elif (directory / ADAPTER).exists():
        raise DamagedAdapter(f"{directory} holds an adapter, and full weights take none.")
    metadata = json.loads((directory / METADATA).read_text())
    return RewardModelState(tensors, PlattScaling(**metadata["platt"]), metadata["metrics"])
