"""Sealed full weights for tests: the base model's weights plus noise."""

import shutil
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from alignment.artifacts import tensor_files
from alignment.artifacts.manifest import write_manifest
from alignment.artifacts.specs import WEIGHTS


def make_weights(directory: Path, base_model: Path, seed: int = 0, noise: float = 0.1) -> str:
    """Write weights with noise, in units of each tensor's standard deviation. Return the manifest's SHA-256."""
    random = np.random.default_rng(seed)
    directory.mkdir(parents=True)
    for path in base_model.iterdir():
        if path.suffix in (".json", ".jinja"):
            shutil.copy(path, directory)
    save_file(
        {
            name: tensor + random.normal(0, noise * tensor.std(), tensor.shape).astype(np.float32)
            for name, tensor in tensor_files.read_tensors(
                base_model / WEIGHTS, tensor_files.read_shapes(base_model / WEIGHTS)
            )
        },
        directory / WEIGHTS,
        metadata={"format": "pt"},
    )
    return write_manifest(directory, {"made": "for a test"})
