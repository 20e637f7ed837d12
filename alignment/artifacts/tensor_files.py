"""A safetensors file, read with numpy alone: each tensor where the header says, and shaped as expected."""

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

Floats = npt.NDArray[np.float32]
Shape = tuple[int, ...]
Entry = tuple[str, Shape, int, int]

WIDTHS = {"F32": 4, "F16": 2, "BF16": 2}


def read(path: Path, shapes: Mapping[str, Shape]) -> Iterator[tuple[str, Floats]]:
    """All tensors as float32, one at a time, for together they may be larger than memory. Raises DamagedAdapter unless
    they are those of `shapes` and fill the file."""
    with _mapped(path) as raw:
        header, start = _header(path, raw)
        missing, extra = shapes.keys() - header.keys(), header.keys() - shapes.keys()
        if missing:
            raise DamagedAdapter(f"{path} lacks {min(missing)} and {len(missing) - 1} others.")
        if extra:
            raise DamagedAdapter(f"{path} holds {min(extra)}, which the base model has no place for.")
        covered = 0
        for name, (dtype, shape, begin, end) in sorted(header.items(), key=lambda item: item[1][2]):
            if shape != shapes[name]:
                raise DamagedAdapter(f"{name} has shape {shape}; the base model takes {shapes[name]}.")
            if dtype not in WIDTHS:
                raise DamagedAdapter(f"{name} is of type {dtype}; a version is {', '.join(WIDTHS)}.")
            if begin != covered or end - begin != math.prod(shape) * WIDTHS[dtype] or start + end > len(raw):
                raise DamagedAdapter(f"{name} does not fill the bytes that the header of {path} gives it.")
            covered = end
            yield name, _decode(raw[start + begin : start + end], dtype).reshape(shape)
        if start + covered != len(raw):
            raise DamagedAdapter(f"{path} has {len(raw) - start - covered} bytes that no tensor owns.")


def shapes_of(path: Path) -> dict[str, Shape]:
    """By name, as the header has them. Raises DamagedAdapter."""
    with _mapped(path) as raw:
        return {name: shape for name, (_, shape, _, _) in _header(path, raw)[0].items()}


def _mapped(path: Path) -> mmap.mmap:
    try:
        with open(path, "rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise DamagedAdapter(f"{path} cannot be read: {error.strerror}.") from error
    except ValueError as error:  # an empty file
        raise DamagedAdapter(f"{path} is not a whole safetensors file.") from error


def _header(path: Path, raw: mmap.mmap) -> tuple[dict[str, Entry], int]:
    """(type, shape, begin, end) by name, and where the bytes begin that it describes."""
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
        raise DamagedAdapter(f"{path} is not a whole safetensors file.") from error
    return header, 8 + length


def _decode(raw: bytes, dtype: str) -> Floats:
    if dtype == "BF16":  # the upper half of a float32; numpy has no such type
        return (np.frombuffer(raw, "<u2").astype(np.uint32) << 16).view(np.float32)
    return np.frombuffer(raw, {"F32": "<f4", "F16": "<f2"}[dtype]).astype(np.float32, copy=False)
