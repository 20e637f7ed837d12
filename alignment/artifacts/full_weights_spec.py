"""What an engine may be given when all weights are trained: a model with the base model's names, shapes and types, and
values of its size.

An engine that cannot load a file has thrown the weights away that it had, and dies when it looks for them at the path
that it could not load. So nothing is read by an engine that has not passed here.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np

from alignment.artifacts import tensor_files
from alignment.artifacts.tensor_files import Floats, Shape
from alignment.errors import DamagedAdapter

WEIGHTS = "model.safetensors"
CONFIG = "config.json"
# Told of precision and of who wrote the file: the engine's type is its own, and so are the names of functions.
LOOSE = {"dtype", "torch_dtype", "transformers_version", "_name_or_path", "architectures"}
# Of a version's tensor against the base model's own, either way; an update moves it by far less.
MAX_GROWTH = 10.0
SMALL = 0.1  # what is smaller, as biases often are, may grow to this, or vanish


@dataclass(frozen=True)
class WeightsSpec:
    """The tensors of a base model, by the names of its files, and the root mean square of each.

    Example: shapes["model.layers.0.self_attn.q_proj.weight"] == (256, 256)
    """

    shapes: dict[str, Shape]
    sizes: dict[str, float]
    config: dict[str, object]

    @classmethod
    def of(cls, base_model: Path) -> Self:
        """Reads the base model whole, in one file or several. Raises ValueError if it is not in safetensors."""
        config = json.loads((base_model / CONFIG).read_text())
        files = sorted(base_model.glob("*.safetensors"))
        if not files:
            raise ValueError(f"{base_model} has no safetensors: full weights need a base model that has.")
        shapes: dict[str, Shape] = {}
        sizes: dict[str, float] = {}
        for file in files:
            for name, tensor in tensor_files.read(file, tensor_files.shapes_of(file)):
                shapes[name], sizes[name] = tensor.shape, _rms(tensor)
        if config.get("tie_word_embeddings"):  # one tensor, under the name of its first use
            shapes.pop("lm_head.weight", None)
        return cls(shapes, sizes, config)


def check_weights(directory: Path, expected: WeightsSpec) -> None:
    """Refuse, with a sentence, weights that the engine must not see."""
    _check_config(directory / CONFIG, expected)
    others = sorted(path.name for path in directory.glob("*.safetensors") if path.name != WEIGHTS)
    if others:  # an engine loads all that it finds
        raise DamagedAdapter(f"{directory} holds {others[0]} beside {WEIGHTS}.")
    for name, tensor in tensor_files.read(directory / WEIGHTS, expected.shapes):
        if not np.isfinite(tensor).all():
            raise DamagedAdapter(f"{name} holds values that are not finite.")
        rms, was = _rms(tensor), expected.sizes[name]
        most = max(MAX_GROWTH * was, SMALL)
        if rms > most:
            raise DamagedAdapter(f"{name} has a root mean square of {rms:.3g}; {most:.3g} is the bound.")
        if was > SMALL / MAX_GROWTH and rms < was / MAX_GROWTH:
            raise DamagedAdapter(f"{name} has a root mean square of {rms:.3g}; the base model's is {was:.3g}.")


def _check_config(path: Path, expected: WeightsSpec) -> None:
    try:
        config = json.loads(path.read_bytes())
        named = config.keys() | expected.config.keys()
    except (OSError, ValueError, AttributeError) as error:
        raise DamagedAdapter(f"{path} cannot be read as a model's configuration.") from error
    for key in sorted(named - LOOSE):
        if config.get(key) != expected.config.get(key):
            told = f"{path} says {key} is {config.get(key)}; the base model's is {expected.config.get(key)}."
            raise DamagedAdapter(told)


def _rms(tensor: Floats) -> float:
    return float(np.sqrt(np.square(tensor, dtype=np.float64).mean())) if tensor.size else 0.0
