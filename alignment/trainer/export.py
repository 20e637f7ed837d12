"""Learner → version directory: written aside, sealed, made durable, renamed into place."""

import shutil
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from alignment.artifacts import publish_directory, seal
from alignment.config.trainer import LoRAConfig
from alignment.trainer import checkpoint
from alignment.trainer.checkpoint import Checkpoint


@dataclass(frozen=True)
class Export:
    """A version as it lies on disk.

    Example: Export(path=Path("versions/shop-v4"), manifest_sha256="9f86d0…", seconds=0.02)
    """

    path: Path
    manifest_sha256: str
    seconds: float


def export(
    directory: Path, content: Checkpoint, lora: LoRAConfig | None, base_model: Path, lineage: Mapping[str, Any]
) -> Export:
    return published(directory, lambda folder: checkpoint.write(folder, content, lora, base_model), lineage)


def published(directory: Path, write: Callable[[Path], None], lineage: Mapping[str, Any]) -> Export:
    """All of it or nothing, whatever `write` puts into the folder that it is given."""
    began = time.perf_counter()
    directory.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{directory.name}-", dir=directory.parent))
    try:
        write(temporary)
        for path in (temporary, *temporary.rglob("*")):  # the engine may run as somebody else
            path.chmod(0o755 if path.is_dir() else 0o644)
        sha256 = seal(temporary, lineage)
        publish_directory(temporary, directory)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)  # gone already when all went well
    return Export(directory, sha256, time.perf_counter() - began)
