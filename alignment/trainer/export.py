"""Export a version directory: write to a temporary directory, write the manifest, fsync, and rename into place."""

import shutil
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from alignment.artifacts import publish_directory, write_manifest
from alignment.config.trainer import LoRAConfig
from alignment.trainer import checkpoint
from alignment.trainer.checkpoint import Checkpoint


@dataclass(frozen=True)
class Export:
    """An exported directory, the hash of its manifest, and how long the export took.

    Example: Export(path=Path("versions/shop-v4"), manifest_sha256="9f86d0…", seconds=0.02)
    """

    path: Path
    manifest_sha256: str
    seconds: float


def export(
    directory: Path, content: Checkpoint, lora: LoRAConfig | None, base_model: Path, lineage: Mapping[str, Any]
) -> Export:
    """Write a checkpoint as an immutable version directory. `lora` is None for full weights."""
    return export_directory(directory, lambda folder: checkpoint.write(folder, content, lora, base_model), lineage)


def export_directory(directory: Path, write: Callable[[Path], None], lineage: Mapping[str, Any]) -> Export:
    """Create `directory` atomically with whatever `write` puts into the folder that it is given.

    Raises FileExistsError if the directory exists.
    """
    started = time.perf_counter()
    directory.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{directory.name}-", dir=directory.parent))
    try:
        write(temporary)
        for path in (temporary, *temporary.rglob("*")):  # the engine may run as another user
            path.chmod(0o755 if path.is_dir() else 0o644)
        sha256 = write_manifest(temporary, lineage)
        publish_directory(temporary, directory)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)  # after a successful rename it no longer exists
    return Export(directory, sha256, time.perf_counter() - started)
