"""Immutable directories: a manifest of file hashes, fsync, and an atomic rename into place."""

import hashlib
import json
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NoReturn

from typing_extensions import TypedDict  # the one that pydantic takes under Python 3.11

from alignment.errors import DamagedAdapter

MANIFEST = "manifest.json"
HASH_THREADS = 4  # files that are hashed at the same time


class FileEntry(TypedDict):
    """A file of a manifest; `size` in bytes."""

    sha256: str
    size: int


def write_manifest(directory: Path, lineage: Mapping[str, object]) -> str:
    """Write the manifest of all files in `directory`, with the lineage, and return the manifest's own sha256."""
    names = _file_names(directory)
    with ThreadPoolExecutor(HASH_THREADS) as threads:
        files = dict(zip(names, threads.map(file_entry, [directory / name for name in names]), strict=True))
    manifest = {"files": files, "lineage": lineage}
    raw = json.dumps(manifest, indent=1, sort_keys=True, allow_nan=False).encode()
    with open(directory / MANIFEST, "wb") as file:
        file.write(raw)
        file.flush()
        os.fsync(file.fileno())
    return hashlib.sha256(raw).hexdigest()


def publish_directory(temporary: Path, final: Path) -> None:
    """Rename a finished directory into place. After a power failure all of it exists or none of it.

    Raises FileExistsError if `final` exists.
    """
    if final.exists():
        raise FileExistsError(f"{final} exists already, and a version never changes.")
    for path in sorted(temporary.rglob("*"), reverse=True):  # children before their directories
        _fsync(path)
    _fsync(temporary)
    os.rename(temporary, final)
    _fsync(final.parent)


def verify(directory: Path, sha256: str | None = None, *, skip: str | None = None) -> dict[str, object]:
    """Check that a directory is byte for byte what its manifest states, and return its lineage.

    With `sha256` the manifest itself must have that hash. Files in the folder `skip` are not read, nor need they exist.

    Raises DamagedAdapter, or OSError as `read_manifest`.
    """
    files, lineage = read_manifest(directory, sha256)
    present = set(_file_names(directory))
    for name in sorted(files.keys() | present):
        if skip is not None and name.startswith(f"{skip}/"):
            continue
        if name not in present:
            raise DamagedAdapter(f"{name} is missing from {directory}, though its {MANIFEST} lists it.")
        if name not in files:
            raise DamagedAdapter(f"{name} in {directory} is not listed in its {MANIFEST}.")
        if is_modified(directory / name, files[name]):
            raise DamagedAdapter(f"{name} in {directory} differs from the hash or size in its {MANIFEST}.")
    return lineage


def read_manifest(directory: Path, sha256: str | None = None) -> tuple[dict[str, FileEntry], dict[str, object]]:
    """Return the entry of each file by its path, and the lineage.

    Raises DamagedAdapter if the manifest is missing, or is not one, or does not have the hash `sha256`. Raises OSError
    if it cannot be read, or if the folder of `directory` is missing: storage that is not mounted may be back.
    """
    try:
        raw = (directory / MANIFEST).read_bytes()
    except FileNotFoundError as error:
        os.stat(directory.parent)
        raise DamagedAdapter(f"{directory} has no {MANIFEST}.") from error
    if sha256 is not None and hashlib.sha256(raw).hexdigest() != sha256:
        raise DamagedAdapter(f"{MANIFEST} of {directory} does not have the sha256 that was recorded for it.")
    try:
        manifest = json.loads(raw)
        files: dict[str, FileEntry] = manifest["files"]
        lineage: dict[str, object] = manifest["lineage"]
    except (ValueError, KeyError, TypeError) as error:
        raise DamagedAdapter(f"{MANIFEST} of {directory} cannot be read as a manifest.") from error
    return files, lineage


def is_modified(path: Path, entry: FileEntry | None) -> bool:
    """Return whether a file differs from its manifest entry, or has none."""
    return file_entry(path) != entry


def _file_names(directory: Path) -> list[str]:
    """Return the paths of all files except the manifest, relative to the directory."""
    paths = (Path(folder, name) for folder, _, names in os.walk(directory, onerror=_raise) for name in names)
    relative = (path.relative_to(directory).as_posix() for path in paths)
    return sorted(name for name in relative if name != MANIFEST)


def _raise(error: OSError) -> NoReturn:
    """Raise it: a folder that cannot be listed must not look like one without files."""
    raise error


def file_entry(path: Path) -> FileEntry:
    """Return the entry of a file in a manifest."""
    with open(path, "rb") as file:
        return {"sha256": hashlib.file_digest(file, "sha256").hexdigest(), "size": path.stat().st_size}


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
