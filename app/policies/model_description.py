"""What a base model is made of, for processes that do not import torch: a program with torch finds it out."""

import subprocess
import sys
from pathlib import Path

from alignment.artifacts.model_spec import ModelSpec

TIMEOUT_SECONDS = 300.0  # an import of torch, on a machine that is busy


def describe_by_program(path: Path) -> ModelSpec:
    """Return what a model is made of, from its config.json, or a folder with one, alone. Takes seconds.

    Raises ValueError for a configuration that transformers does not know, and for a model that training does not
    support.
    """
    command = [sys.executable, "-m", "alignment.models.describe", str(path)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_SECONDS)
    if result.returncode != 0:
        lines = result.stderr.strip().splitlines() or [f"exit code {result.returncode}"]
        raise ValueError(lines[-1].removeprefix("ValueError: "))
    return ModelSpec.from_json(result.stdout)
