"""Results of a benchmark: a finished run is a line of JSON, so that the benchmark can be stopped and resumed."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def read_rows(out: Path) -> list[dict[str, Any]]:
    """Return the finished runs, none if there is no file."""
    return [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []


def append_row(out: Path, row: Mapping[str, Any]) -> None:
    """Add a finished run. The file and its folder are created if needed."""
    out.parent.mkdir(parents=True, exist_ok=True)
    with out.open("a") as file:
        file.write(json.dumps(row) + "\n")
