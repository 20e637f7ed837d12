"""What a learner is between two updates, on disk: adapter, optimizer and progress, as safetensors and JSON.

adapter_model.safetensors   adapter_config.json   for the engine
trainer/optimizer.safetensors   trainer/state.json   to go on learning, bit for bit
"""

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor

from alignment.config import LoRAConfig
from alignment.manifest import ADAPTER, AdapterSpec, check_adapter, verify
from alignment.model import adapter

OPTIMIZER = Path("trainer/optimizer.safetensors")
STATE = Path("trainer/state.json")


@dataclass(frozen=True)
class Progress:
    """How far the policy is: updates made, optimizer steps in them, running baseline of its rewards."""

    updates: int = 0
    optimizer_steps: int = 0
    baseline: float = 0.0


@dataclass(frozen=True)
class Checkpoint:
    """All that a learner is, whole. `moments` is None for an adapter that was not trained here."""

    adapter: dict[str, Tensor]
    moments: dict[str, Tensor] | None
    progress: Progress


def write(directory: Path, checkpoint: Checkpoint, lora: LoRAConfig, base_model: Path) -> None:
    assert checkpoint.moments is not None, "a learner always has moments"
    (directory / STATE).parent.mkdir()
    save_file(_plain(checkpoint.adapter), directory / ADAPTER)
    adapter.write_config(directory, lora, base_model)
    save_file(_plain(checkpoint.moments), directory / OPTIMIZER)
    (directory / STATE).write_text(json.dumps(asdict(checkpoint.progress)))


def read(directory: Path, spec: AdapterSpec) -> Checkpoint:
    """Refuse what is damaged or does not fit the base model; begin anew where there is no trainer's state."""
    verify(directory)
    check_adapter(directory, spec)
    tensors = load_file(directory / ADAPTER)
    if not (directory / STATE).exists():
        return Checkpoint(tensors, None, Progress())
    progress = replace(Progress(), **json.loads((directory / STATE).read_text()))
    return Checkpoint(tensors, load_file(directory / OPTIMIZER), progress)


def _plain(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
