"""Directories that never change: sealed by a manifest of hashes, made durable, then renamed into place."""

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from alignment.errors import DamagedAdapter

MANIFEST = "manifest.json"
Description = dict[str, Any]  # a file's sha256 and size


def seal(directory: Path, lineage: Mapping[str, Any]) -> str:
    """Write the manifest of all files in `directory`; return the manifest's own sha256."""
    files = {name: _describe(directory / name) for name in _names(directory)}
    manifest = {"files": files, "lineage": lineage}
    raw = json.dumps(manifest, indent=1, sort_keys=True, allow_nan=False).encode()
    with open(directory / MANIFEST, "wb") as file:
        file.write(raw)
        file.flush()
        os.fsync(file.fileno())
    return hashlib.sha256(raw).hexdigest()


def publish_directory(temporary: Path, final: Path) -> None:
    """Rename a finished directory into place so that a power cut leaves all of it or none of it."""
    if final.exists():
        raise FileExistsError(f"{final} exists already, and a version never changes.")
    for path in sorted(temporary.rglob("*"), reverse=True):  # children before their folders
        _fsync(path)
    _fsync(temporary)
    os.rename(temporary, final)
    _fsync(final.parent)


def verify(directory: Path, sha256: str | None = None) -> dict[str, Any]:
    """Refuse a directory that is not byte for byte what was sealed; return its lineage."""
    files, lineage = sealed(directory, sha256)
    found = set(_names(directory))
    for name in sorted(files.keys() | found):
        if name not in found:
            raise DamagedAdapter(f"{name} is missing from {directory}.")
        if name not in files:
            raise DamagedAdapter(f"{name} in {directory} was not there when it was sealed.")
        if unlike(directory / name, files[name]):
            raise DamagedAdapter(f"{name} in {directory} is not what was sealed.")
    return lineage


def sealed(directory: Path, sha256: str | None = None) -> tuple[dict[str, Description], dict[str, Any]]:
    """What the manifest says of each file, and the lineage. Refuses one that is not the one of that `sha256`."""
    try:
        raw = (directory / MANIFEST).read_bytes()
    except OSError as error:
        raise DamagedAdapter(f"{directory} has no readable {MANIFEST}: {error.strerror}.") from error
    if sha256 is not None and hashlib.sha256(raw).hexdigest() != sha256:
        raise DamagedAdapter(f"{MANIFEST} of {directory} is not the one that was recorded.")
    try:
        manifest = json.loads(raw)
        files: dict[str, Description] = manifest["files"]
        lineage: dict[str, Any] = manifest["lineage"]
    except (ValueError, KeyError, TypeError) as error:
        raise DamagedAdapter(f"{MANIFEST} of {directory} cannot be read as a manifest.") from error
    return files, lineage


def unlike(path: Path, description: Description | None) -> bool:
    """Whether the file is not what a manifest says of it."""
    return _describe(path) != description


def _names(directory: Path) -> list[str]:
    """Every file but the manifest, by its path inside the directory."""
    paths = (path.relative_to(directory).as_posix() for path in directory.rglob("*") if not path.is_dir())
    return sorted(name for name in paths if name != MANIFEST)


def _describe(path: Path) -> Description:
    with open(path, "rb") as file:
        return {"sha256": hashlib.file_digest(file, "sha256").hexdigest(), "size": path.stat().st_size}


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
