"""The adapter or the full weights that an engine may load: names, shapes, dtypes, configuration and size of the values.

An engine accepts an adapter of the wrong shape and crashes at its first use, and generates nonsense from one with NaN
values. An engine that fails to load full weights has already dropped its previous ones, and crashes when it then reads
the path that it could not load. Every version must therefore pass `check_adapter` or `check_weights` before an engine
loads it. The checks need numpy only.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

import numpy as np
from pydantic import TypeAdapter

from alignment.artifacts.model_spec import ModelSpec
from alignment.artifacts.tensor_files import FloatArray, Shape, read_shapes, read_tensors
from alignment.config.trainer import LoRAConfig
from alignment.errors import DamagedAdapter

ADAPTER = "adapter_model.safetensors"
ADAPTER_CONFIG = "adapter_config.json"
TRAINER_STATE = "trainer"  # the folder that no engine reads: optimizer, critic, progress
ADAPTER_PREFIX = "base_model.model."  # of the names in an adapter's file: peft wraps a model twice
WEIGHTS = "model.safetensors"
CONFIG = "config.json"
# Untrained adapters have a root mean square of about 0.04, trained ones stay below 1; 10 outweighs the base model.
MAX_ADAPTER_RMS = 10.0
# Keys that may differ: they state the precision and the software that wrote the file, which the engine ignores.
IGNORED_CONFIG_KEYS = {"dtype", "torch_dtype", "transformers_version", "_name_or_path", "architectures"}
# The largest factor between the root mean square of a version's tensor and of the base model's, in either direction.
# An update changes it by far less.
MAX_GROWTH = 10.0
MIN_RMS_LIMIT = 0.1  # smaller tensors, as biases often are, may grow up to this or become zero


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
    def from_model(cls, model: ModelSpec, lora: LoRAConfig) -> Self:
        """Derive the specification of the adapters of a model.

        Raises ValueError for target modules that the model does not have, or that cannot have adapters.
        """
        names = frozenset(model.target_modules if lora.target_modules is None else lora.target_modules)
        unknown = names - set(model.target_modules)
        if unknown or not names:
            raise ValueError(
                f"{model.architecture} has no adapters on {', '.join(sorted(unknown)) or 'any layer'}. "
                f"trainer.lora.target_modules may be: {', '.join(model.target_modules) or 'nothing'}."
            )
        shapes: dict[str, tuple[int, int]] = {}
        for linear in model.layers_called(names):
            shapes[f"{ADAPTER_PREFIX}{linear.path}.lora_A.weight"] = (lora.r, linear.in_features)
            shapes[f"{ADAPTER_PREFIX}{linear.path}.lora_B.weight"] = (linear.out_features, lora.r)
        return cls(lora.r, lora.alpha, names, shapes)

    @property
    def scale(self) -> float:
        """Return what the adapter's output is multiplied by."""
        return self.alpha / self.rank

    @property
    def module_paths(self) -> tuple[str, ...]:
        """Return the paths of the layers that have an adapter."""
        suffix = ".lora_A.weight"
        return tuple(
            name.removeprefix(ADAPTER_PREFIX).removesuffix(suffix) for name in self.shapes if name.endswith(suffix)
        )

    def to_json(self) -> dict[str, object]:
        return {**asdict(self), "target_modules": sorted(self.target_modules)}

    @classmethod
    def from_json(cls, fields: Mapping[str, object]) -> Self:
        """Read what `to_json` returned, after a passage through JSON. Raises ValueError for anything else."""
        return TypeAdapter(cls).validate_python(fields)


def check_adapter(directory: Path, expected: AdapterSpec) -> None:
    """Raise DamagedAdapter, with the reason, if an engine must not load the adapter in `directory`."""
    _check_adapter_config(directory / ADAPTER_CONFIG, expected)
    values = dict(read_tensors(directory / ADAPTER, expected.shapes))
    for name, tensor in values.items():
        _check_rms(name, tensor, MAX_ADAPTER_RMS)
        # A starts random, so a row of zeros was never written; B starts as zeros, but in all layers together.
        if name.endswith("lora_A.weight") and not tensor.any(axis=1).all():
            raise DamagedAdapter(f"{name} has a row of zeros, as a truncated file does.")
    untrained = {name for name in values if name.endswith("lora_B.weight") and not values[name].any()}
    if untrained and 2 * len(untrained) < len(values):
        raise DamagedAdapter(f"{min(untrained)} is all zeros while other tensors are trained.")


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
            for name, tensor in read_tensors(file, read_shapes(file)):
                shapes[name], rms[name] = tensor.shape, _rms(tensor)
        if config.get("tie_word_embeddings"):  # a tied tensor is stored once, under the name of the embeddings
            shapes.pop("lm_head.weight", None)
        return cls(shapes, rms, config)


def check_weights(directory: Path, expected: WeightsSpec) -> None:
    """Raise DamagedAdapter, with the reason, if an engine must not load the weights in `directory`."""
    _check_weights_config(directory / CONFIG, expected)
    others = sorted(path.name for path in directory.glob("*.safetensors") if path.name != WEIGHTS)
    if others:  # an engine loads every safetensors file that it finds
        raise DamagedAdapter(f"{directory} holds {others[0]} beside {WEIGHTS}; an engine would load both.")
    for name, tensor in read_tensors(directory / WEIGHTS, expected.shapes):
        base_rms = expected.rms[name]
        rms = _check_rms(name, tensor, max(MAX_GROWTH * base_rms, MIN_RMS_LIMIT))
        if base_rms > MIN_RMS_LIMIT / MAX_GROWTH and rms < base_rms / MAX_GROWTH:
            raise DamagedAdapter(f"{name} has a root mean square of {rms:.3g}; the base model has {base_rms:.3g}.")


def _check_adapter_config(path: Path, expected: AdapterSpec) -> None:
    config = _read_config(path)
    required = {"r": expected.rank, "lora_alpha": expected.alpha, "target_modules": sorted(expected.target_modules)}
    for key, value in required.items():
        actual = config.get(key)
        if (sorted(actual, key=str) if isinstance(actual, list) else actual) != value:
            raise DamagedAdapter(f"{path} says {key} is {actual}; the engine serves {value}.")
    for key in ("use_dora", "use_rslora", "modules_to_save", "rank_pattern", "alpha_pattern"):
        if config.get(key):
            raise DamagedAdapter(f"{path} sets {key}, which the engine ignores or rejects.")


def _check_weights_config(path: Path, expected: WeightsSpec) -> None:
    config = _read_config(path)
    for key in sorted((config.keys() | expected.config.keys()) - IGNORED_CONFIG_KEYS):
        if config.get(key) != expected.config.get(key):
            raise DamagedAdapter(
                f"{path} says {key} is {config.get(key)}; the base model has {expected.config.get(key)}."
            )


def _read_config(path: Path) -> dict[str, object]:
    try:
        config = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise DamagedAdapter(f"{path} is not a readable configuration.") from error
    if not isinstance(config, dict):
        raise DamagedAdapter(f"{path} is not a readable configuration.")
    return config


def _check_rms(name: str, tensor: FloatArray, limit: float) -> float:
    """Return the root mean square of a tensor. Raise DamagedAdapter if it is above the limit or not finite."""
    if not np.isfinite(tensor).all():
        raise DamagedAdapter(f"{name} holds values that are not finite.")
    rms = _rms(tensor)
    if rms > limit:
        raise DamagedAdapter(f"{name} has a root mean square of {rms:.3g}; the limit is {limit:.3g}.")
    return rms


def _rms(tensor: FloatArray) -> float:
    return float(np.sqrt(np.square(tensor, dtype=np.float64).mean())) if tensor.size else 0.0
