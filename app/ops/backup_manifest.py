"""The manifest of a backup: what the folder holds, with the hash of every file, and how to check it.

A backup is a folder: the database in one file, the folders of versions and reward models as they were sealed, the
experiment logs, `backup.json` (the manifest), and `backup.sha256` (the hash of the manifest).
"""

import hashlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ValidationError

from alignment.artifacts.manifest import MANIFEST, FileEntry, is_modified, read_manifest
from alignment.errors import DamagedAdapter

FORMAT = 1
BACKUP_MANIFEST, BACKUP_SHA256 = "backup.json", "backup.sha256"
CHUNK_BYTES = 1 << 20
# Called with what is being done, the bytes that are done, and the bytes of the whole (None: not known).
Report = Callable[[str, int, int | None], None]


class BackupError(ValueError):
    """The backup cannot be made, read or restored. The message says why and what to do."""


class Artifact(BaseModel):
    """The sealed folder of a version or a reward model that a row of the database names.

    `in_use`: the deployment needs it to serve or to train: a version that serves, served last, is the canary, the head
    of training, pinned, waits for its release, or is the parent of an open batch; a reward model that serves.
    """

    kind: Literal["version", "reward_model"]
    id: str
    name: str
    source: str
    manifest_sha256: str
    in_use: bool

    @property
    def path(self) -> str:
        """The folder's place in the backup and under the home. Example: "versions/shop-3f2a1b-v12.9c01d2e3.1" """
        source = Path(self.source)
        if self.kind == "version":
            return f"versions/{source.name}"
        return f"reward_models/{source.parent.name}/{source.name}"


class Contents(BaseModel):
    """What the database's snapshot holds.

    `webhook_secrets` counts the signing secrets by the name of the key that they are encrypted with.
    """

    schema_revision: str
    rows: dict[str, int]
    base_models: list[str]
    artifacts: list[Artifact]
    webhook_secrets: dict[str, int] = {}


class BackupManifest(BaseModel):
    """`absent` maps the path of each artifact whose files were not there, or damaged, to the reason."""

    format: int
    created_at: float
    database: Literal["sqlite", "postgresql"]
    database_file: str
    contents: Contents
    absent: dict[str, str]
    files: dict[str, FileEntry]

    @property
    def num_bytes(self) -> int:
        return sum(entry["size"] for entry in self.files.values())


def copy_file(source: Path, target: Path, report: Callable[[int], None]) -> FileEntry:
    """Copy a file, private to its owner, and return the hash and the size of what was read."""
    make_private_folder(target.parent)
    sha256, size = hashlib.sha256(), 0
    with open(source, "rb") as reader, open_private(target) as writer:
        while chunk := reader.read(CHUNK_BYTES):
            writer.write(chunk)
            sha256.update(chunk)
            size += len(chunk)
            report(len(chunk))
        writer.flush()
        os.fsync(writer.fileno())
    return {"sha256": sha256.hexdigest(), "size": size}


def open_private(path: Path) -> Any:
    """Open a new file for writing that only its owner may read."""
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb")


def make_private_folder(path: Path) -> None:
    """Create the folder and its parents so that only their owner may enter. One that exists keeps its permissions."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    for folder in reversed(missing):
        folder.mkdir(0o700, exist_ok=True)


def write_backup_manifest(folder: Path, manifest: BackupManifest) -> str:
    """Write the manifest and its hash. Returns the hash."""
    raw = manifest.model_dump_json(indent=1).encode()
    sha256 = hashlib.sha256(raw).hexdigest()
    for name, content in ((BACKUP_MANIFEST, raw), (BACKUP_SHA256, f"{sha256}  {BACKUP_MANIFEST}\n".encode())):
        with open_private(folder / name) as file:
            file.write(content)
    return sha256


def read_backup_manifest(folder: Path) -> BackupManifest:
    """Raises BackupError if the manifest is missing, damaged, or of a later format."""
    try:
        raw = (folder / BACKUP_MANIFEST).read_bytes()
        recorded = (folder / BACKUP_SHA256).read_text(errors="replace").split()[:1]
    except OSError as error:
        reason = f"{Path(error.filename).name}: {error.strerror}"
        raise BackupError(f"{folder} is no complete backup ({reason}): name a folder that `create` has made") from error
    if [hashlib.sha256(raw).hexdigest()] != recorded:
        raise BackupError(f"{folder / BACKUP_MANIFEST} does not have the sha256 in {BACKUP_SHA256}")
    try:
        manifest = BackupManifest.model_validate_json(raw)
    except ValidationError as error:
        raise BackupError(f"{folder / BACKUP_MANIFEST} cannot be read as a backup of format {FORMAT}") from error
    if manifest.format != FORMAT:
        raise BackupError(f"{folder} has the format {manifest.format}; this release reads format {FORMAT}")
    return manifest


def find_problems(folder: Path, manifest: BackupManifest, report: Report) -> Iterator[str]:
    """Yield what is missing, damaged or not listed, one sentence each."""
    present = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if not path.is_dir()}
    done, total = 0, manifest.num_bytes
    for name in sorted(manifest.files.keys() | present - {BACKUP_MANIFEST, BACKUP_SHA256}):
        if name not in present:
            yield f"{name} is missing"
        elif name not in manifest.files:
            yield f"{name} is not part of the backup"
        elif is_modified(folder / name, manifest.files[name]):
            yield f"{name} is damaged: its hash or size differs from the manifest's"
        done += manifest.files.get(name, {"size": 0})["size"]
        report("verify", done, total)
    if manifest.database_file not in manifest.files:
        yield "it lists no database"
    for artifact in manifest.contents.artifacts:
        if artifact.path not in manifest.absent and (problem := _find_unlisted(folder, manifest, artifact)) is not None:
            yield problem


def _find_unlisted(folder: Path, manifest: BackupManifest, artifact: Artifact) -> str | None:
    """Return what the backup lacks of a folder that the database names, or None."""
    try:
        entries, _ = read_manifest(folder / artifact.path, artifact.manifest_sha256)
    except (DamagedAdapter, FileNotFoundError) as error:
        return f"{artifact.kind} {artifact.name}: {error}"
    prefix = f"{artifact.path}/"
    listed = {name.removeprefix(prefix): entry for name, entry in manifest.files.items() if name.startswith(prefix)}
    listed.pop(MANIFEST, None)
    if listed != entries:
        return f"{artifact.kind} {artifact.name}: the backup does not hold the files that its {MANIFEST} lists"
    return None
