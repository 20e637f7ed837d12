"""The full weights that an engine may load: the names, shapes and configuration of the base model, values of its size.

An engine that fails to load a file has already dropped its previous weights, and crashes when it then reads the path
that it could not load. Every version of full weights must therefore pass `check_weights` before an engine loads it.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np

from alignment.artifacts import tensor_files
from alignment.artifacts.tensor_files import FloatArray, Shape
from alignment.errors import DamagedAdapter

WEIGHTS = "model.safetensors"
CONFIG = "config.json"
# Keys that may differ: they state the precision and the software that wrote the file, which the engine ignores.
IGNORED_CONFIG_KEYS = {"dtype", "torch_dtype", "transformers_version", "_name_or_path", "architectures"}
# The largest factor between the root mean square of a version's tensor and of the base model's, in either direction.
# An update changes it by far less.
MAX_GROWTH = 10.0
MIN_RMS_LIMIT = 0.1  # smaller tensors, as biases often are, may grow up to this or become zero


@dataclass(frozen=True)
class WeightsSpec:
    """The tensors of a base model by the names of its files: shape and root mean square (rms) of each.

    Example: shapes["model.layers.0.self_attn.q_proj.weight"] == (256, 256)
    """

    shapes: dict[str, Shape]
    rms: dict[str, float]
    config: dict[str, object]

    @classmethod
    def from_base_model(cls, base_model: Path) -> Self:
        """Read the base model's safetensors files, one or several. Raises ValueError if it has none."""
        config = json.loads((base_model / CONFIG).read_text())
        files = sorted(base_model.glob("*.safetensors"))
        if not files:
            raise ValueError(f"{base_model} has no safetensors files, which training of full weights needs.")
        shapes: dict[str, Shape] = {}
        rms: dict[str, float] = {}
        for file in files:
            for name, tensor in tensor_files.read_tensors(file, tensor_files.read_shapes(file)):
                shapes[name], rms[name] = tensor.shape, _rms(tensor)
        if config.get("tie_word_embeddings"):  # a tied tensor is stored once, under the name of the embeddings
            shapes.pop("lm_head.weight", None)
        return cls(shapes, rms, config)


def check_weights(directory: Path, expected: WeightsSpec) -> None:
    """Raise DamagedAdapter, with the reason, if an engine must not load the weights in `directory`."""
    _check_config(directory / CONFIG, expected)
    others = sorted(path.name for path in directory.glob("*.safetensors") if path.name != WEIGHTS)
    if others:  # an engine loads every safetensors file that it finds
        raise DamagedAdapter(f"{directory} holds {others[0]} beside {WEIGHTS}; an engine would load both.")
    for name, tensor in tensor_files.read_tensors(directory / WEIGHTS, expected.shapes):
        if not np.isfinite(tensor).all():
            raise DamagedAdapter(f"{name} holds values that are not finite.")
        rms, base_rms = _rms(tensor), expected.rms[name]
        limit = max(MAX_GROWTH * base_rms, MIN_RMS_LIMIT)
        if rms > limit:
            raise DamagedAdapter(f"{name} has a root mean square of {rms:.3g}; the limit is {limit:.3g}.")
        if base_rms > MIN_RMS_LIMIT / MAX_GROWTH and rms < base_rms / MAX_GROWTH:
            raise DamagedAdapter(f"{name} has a root mean square of {rms:.3g}; the base model has {base_rms:.3g}.")


def _check_config(path: Path, expected: WeightsSpec) -> None:
    try:
        config = json.loads(path.read_bytes())
        keys = config.keys() | expected.config.keys()
    except (OSError, ValueError, AttributeError) as error:
        raise DamagedAdapter(f"{path} is not a readable model configuration.") from error
    for key in sorted(keys - IGNORED_CONFIG_KEYS):
        if config.get(key) != expected.config.get(key):
            raise DamagedAdapter(
                f"{path} says {key} is {config.get(key)}; the base model has {expected.config.get(key)}."
            )


def _rms(tensor: FloatArray) -> float:
    return float(np.sqrt(np.square(tensor, dtype=np.float64).mean())) if tensor.size else 0.0
