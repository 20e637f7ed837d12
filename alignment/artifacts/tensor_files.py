"""Read safetensors files with numpy, and check that names, shapes and dtypes are as expected."""

import math
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open

from alignment.errors import DamagedAdapter

FloatArray = npt.NDArray[np.float32]
Shape = tuple[int, ...]

STORED_TYPES = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}


def read_tensors(path: Path, shapes: Mapping[str, Shape]) -> Iterator[tuple[str, FloatArray]]:
    """Yield the name and float32 values of each tensor, one at a time: together they may be larger than memory.

    Raises DamagedAdapter unless the file holds exactly the tensors of `shapes` and nothing else.
    """
    header = _read_header(path)
    missing, extra = shapes.keys() - header.keys(), header.keys() - shapes.keys()
    if missing:
        raise DamagedAdapter(f"{path} lacks {min(missing)} and {len(missing) - 1} other tensors.")
    if extra:
        raise DamagedAdapter(f"{path} holds {min(extra)}, which the base model does not have.")
    raw = np.memmap(path, np.uint8, "r")
    begin = 8 + int.from_bytes(raw[:8].tobytes(), "little")  # the file begins with the length of its header
    for name, (dtype, shape) in header.items():
        if shape != shapes[name]:
            raise DamagedAdapter(f"{name} in {path} has shape {shape}; the base model needs {shapes[name]}.")
        if dtype not in STORED_TYPES:
            raise DamagedAdapter(f"{name} in {path} has dtype {dtype}; supported are {', '.join(STORED_TYPES)}.")
        end = begin + math.prod(shape) * np.dtype(STORED_TYPES[dtype]).itemsize
        stored = np.frombuffer(raw[begin:end].tobytes(), STORED_TYPES[dtype]).reshape(shape)
        if dtype == "BF16":  # numpy has no bfloat16; it is the upper half of a float32
            stored = (stored.astype(np.uint32) << 16).view(np.float32)
        yield name, stored.astype(np.float32, copy=False)
        begin = end


def read_shapes(path: Path) -> dict[str, Shape]:
    """Return the shapes of all tensors by name, from the header. Raises DamagedAdapter."""
    return {name: shape for name, (_, shape) in _read_header(path).items()}


def _read_header(path: Path) -> dict[str, tuple[str, Shape]]:
    """Return each tensor's dtype and shape, in the file's order. safetensors checks that they cover the whole file."""
    try:
        with safe_open(path, "numpy") as file:
            entries = {name: file.get_slice(name) for name in file.offset_keys()}
            return {name: (entry.get_dtype(), tuple(entry.get_shape())) for name, entry in entries.items()}
    except OSError as error:
        raise DamagedAdapter(f"{path} cannot be read: {error}.") from error
    except SafetensorError as error:
        raise DamagedAdapter(f"{path} is not a complete safetensors file: {error}.") from error
