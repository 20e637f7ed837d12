"""Sealed full weights for the base model of a test: its own, and a little noise."""

import shutil
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from alignment.artifacts import WEIGHTS, seal, tensor_files


def make_weights(directory: Path, base_model: Path, seed: int = 0, noise: float = 0.1) -> str:
    """`noise`: its deviation, in root mean squares of each tensor. Returns the manifest's SHA-256."""
    random = np.random.default_rng(seed)
    directory.mkdir(parents=True)
    for path in base_model.iterdir():
        if path.suffix in (".json", ".jinja"):
            shutil.copy(path, directory)
    save_file(
        {
            name: tensor + random.normal(0, noise * tensor.std(), tensor.shape).astype(np.float32)
            for name, tensor in tensor_files.read(base_model / WEIGHTS, tensor_files.shapes_of(base_model / WEIGHTS))
        },
        directory / WEIGHTS,
        metadata={"format": "pt"},
    )
    return seal(directory, {"made": "for a test"})
