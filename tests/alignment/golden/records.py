"""The frozen vectors of this folder, as `tests.parity.freeze` wrote them."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import torch

from tests.parity.draws import Kind, Tensors

FOLDER = Path(__file__).parent
DRAWS = FOLDER / "draws.json"


@cache
def _draws() -> dict[str, dict[str, Any]]:
    return json.loads(DRAWS.read_text())


def batch_of(kind: Kind) -> Tensors:
    """Return the frozen batch of a kind, [6, 8], float64."""
    return {name: torch.tensor(x, dtype=_dtype(x)) for name, x in _draws()[kind].items()}


def records() -> list[dict[str, Any]]:
    paths = sorted(path for path in FOLDER.glob("*.json") if path != DRAWS)
    return [record for path in paths for record in json.loads(path.read_text())]


def _dtype(x: Any) -> torch.dtype | None:
    """Return None, which keeps integers (groups, lengths, labels), or float64."""
    first = x[0][0] if isinstance(x[0], list) else x[0]
    return torch.float64 if isinstance(first, float) else None
