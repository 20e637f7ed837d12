"""Read safetensors files with numpy, and check that names, shapes, dtypes and offsets are as expected."""

import json
import math
import mmap
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from alignment.errors import DamagedAdapter

FloatArray = npt.NDArray[np.float32]
Shape = tuple[int, ...]
HeaderEntry = tuple[str, Shape, int, int]  # dtype, shape, begin and end offset in bytes

BYTES_PER_ELEMENT = {"F32": 4, "F16": 2, "BF16": 2}


def read_tensors(path: Path, shapes: Mapping[str, Shape]) -> Iterator[tuple[str, FloatArray]]:
    """Yield the name and float32 values of each tensor, one at a time: together they may be larger than memory.

    Raises DamagedAdapter unless the file holds exactly the tensors of `shapes` and nothing else.
    """
    with _map_file(path) as raw:
        header, start = _header(path, raw)
        missing, extra = shapes.keys() - header.keys(), header.keys() - shapes.keys()
        if missing:
            raise DamagedAdapter(f"{path} lacks {min(missing)} and {len(missing) - 1} other tensors.")
        if extra:
            raise DamagedAdapter(f"{path} holds {min(extra)}, which the base model does not have.")
        covered = 0
        for name, (dtype, shape, begin, end) in sorted(header.items(), key=lambda item: item[1][2]):
            if shape != shapes[name]:
                raise DamagedAdapter(f"{name} in {path} has shape {shape}; the base model needs {shapes[name]}.")
            if dtype not in BYTES_PER_ELEMENT:
                raise DamagedAdapter(
                    f"{name} in {path} has dtype {dtype}; supported are {', '.join(BYTES_PER_ELEMENT)}."
                )
            if begin != covered or end - begin != math.prod(shape) * BYTES_PER_ELEMENT[dtype] or start + end > len(raw):
                raise DamagedAdapter(
                    f"{name} in {path}: its offsets do not match its shape and dtype or the size of the file."
                )
            covered = end
            yield name, _decode(raw[start + begin : start + end], dtype).reshape(shape)
        if start + covered != len(raw):
            raise DamagedAdapter(f"{path} has {len(raw) - start - covered} bytes that belong to no tensor.")


def read_shapes(path: Path) -> dict[str, Shape]:
    """Return the shapes of all tensors by name, from the header. Raises DamagedAdapter."""
    with _map_file(path) as raw:
        return {name: shape for name, (_, shape, _, _) in _header(path, raw)[0].items()}


def _map_file(path: Path) -> mmap.mmap:
    try:
        with open(path, "rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise DamagedAdapter(f"{path} cannot be read: {error.strerror}.") from error
    except ValueError as error:  # an empty file
        raise DamagedAdapter(f"{path} is not a complete safetensors file.") from error


def _header(path: Path, raw: mmap.mmap) -> tuple[dict[str, HeaderEntry], int]:
    """Return the header entries by tensor name, and the offset of the tensor data in the file."""
    try:
        (length,) = struct.unpack_from("<Q", raw)
        fields: dict[str, Any] = json.loads(raw[8 : 8 + length])
        fields.pop("__metadata__", None)
        header = {
            name: (
                str(entry["dtype"]),
                tuple(int(side) for side in entry["shape"]),
                int(entry["data_offsets"][0]),
                int(entry["data_offsets"][1]),
            )
            for name, entry in fields.items()
        }
    except (struct.error, ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise DamagedAdapter(f"{path} is not a complete safetensors file.") from error
    return header, 8 + length


def _decode(raw: bytes, dtype: str) -> FloatArray:
    if dtype == "BF16":  # numpy has no bfloat16; it is the upper half of a float32
        return (np.frombuffer(raw, "<u2").astype(np.uint32) << 16).view(np.float32)
    return np.frombuffer(raw, {"F32": "<f4", "F16": "<f2"}[dtype]).astype(np.float32, copy=False)
