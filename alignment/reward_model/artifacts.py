"""A reward model on disk, sealed as a version is.

adapter_model.safetensors   adapter_config.json    the adapter; not with full weights
head.safetensors                                   the head's weight and bias
reward_model.json                                  what turns its score into a reward, and what it was measured at
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
from alignment.functional import Platt
from alignment.models import lora as model_lora
from alignment.models.policy_model import REWARD_HEAD

HEAD = "head.safetensors"
FACTS = "reward_model.json"


@dataclass(frozen=True)
class Content:
    """Tensors by name, whole; `platt` makes chances of scores."""

    tensors: dict[str, Tensor]
    platt: Platt
    metrics: dict[str, Any]


def write(directory: Path, content: Content, lora: LoRAConfig | None, base_model: Path) -> None:
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in content.tensors.items()}
    heads = {name: tensor for name, tensor in tensors.items() if name.startswith(REWARD_HEAD)}
    save_file(heads, directory / HEAD)
    if lora is not None:
        save_file({name: tensor for name, tensor in tensors.items() if name not in heads}, directory / ADAPTER)
        model_lora.write_config(directory, lora, base_model)
    facts = {"platt": content.platt._asdict(), "metrics": content.metrics}
    (directory / FACTS).write_text(json.dumps(facts, indent=1, sort_keys=True, allow_nan=False))


def read(directory: Path, sha256: str, spec: AdapterSpec | None) -> Content:
    """Refuses, by DamagedAdapter, what is not byte for byte what was sealed under this hash of the manifest, and what
    does not fit the base model. `spec` is None for full weights."""
    verify(directory, sha256)
    tensors: dict[str, Tensor] = load_file(directory / HEAD)
    if spec is not None:
        check_adapter(directory, spec)
        tensors |= load_file(directory / ADAPTER)
    elif (directory / ADAPTER).exists():
        raise DamagedAdapter(f"{directory} holds an adapter, and full weights take none.")
    facts = json.loads((directory / FACTS).read_text())
    return Content(tensors, Platt(**facts["platt"]), facts["metrics"])
