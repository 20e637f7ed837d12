"""Back up a deployment while it runs: the database and the folders that its rows name, as one consistent set.

The database's snapshot comes first, and its rows name the folders of versions and reward models. These never change
once they are sealed, so that copies made after the snapshot belong to it. If retention moves or deletes a folder in
between, there is a new snapshot.

A backup holds what the database holds: chats and feedback, the hashes of API keys, the secrets that sign feedback
tokens, and, encrypted, those that sign webhooks. It holds no encryption key, no API key, no key of an engine and no
secret of the settings.
"""

import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from alignment.artifacts import manifest as sealed
from alignment.errors import DamagedAdapter
from app.core.database_roles import grant_service
from app.core.encryption import CLEAR_TEXT, read_cipher
from app.core.settings import Settings
from app.ops import backup_database, restore_database
from app.ops.backup_connections import is_sqlite
from app.ops.backup_manifest import (
    FORMAT,
    Artifact,
    BackupError,
    BackupManifest,
    Contents,
    Report,
    copy_file,
    find_problems,
    make_private_folder,
    read_backup_manifest,
    write_backup_manifest,
)

MAX_SNAPSHOTS = 3
MAX_PROBLEMS_SHOWN = 5
ARTIFACT_FOLDERS = ("versions", "reward_models")
METRICS = "metrics"
RESTORE_MARKER = ".restoring"  # a file in the home, from the beginning of a restore to its end


def create_backup(settings: Settings, destination: Path, report: Report, *, incomplete: bool = False) -> BackupManifest:
    """Back up the deployment into the new folder `destination`, which appears when it is complete.

    Raises BackupError, also if a version or a reward model in use has no intact files, unless `incomplete` allows it.
    """
    destination = destination.absolute()
    if destination.exists():
        raise BackupError(f"{destination} exists: name a new folder for the backup")
    make_private_folder(destination.parent)
    with _temporary_folder(destination) as folder:
        for attempt in range(1, MAX_SNAPSHOTS + 1):
            database_file, contents = backup_database.copy_database(settings.database_url, folder, report)
            absent = _copy_artifacts(contents, folder, report)
            lost = [artifact for artifact in contents.artifacts if artifact.path in absent]
            outdated = _find_outdated(settings, lost) if attempt < MAX_SNAPSHOTS else []
            damaged = [artifact for artifact in lost if artifact.in_use and artifact not in outdated]
            if damaged and not incomplete:
                raise BackupError(_describe_lost(damaged, absent))
            if not outdated:
                break
            shutil.rmtree(folder)
            folder.mkdir(0o700)
        for log in sorted(settings.metrics_dir.glob("*.jsonl")):
            copy_file(log, folder / METRICS / log.name, lambda size: None)
        manifest = BackupManifest(
            format=FORMAT,
            created_at=time.time(),
            database="sqlite" if is_sqlite(settings.database_url) else "postgresql",
            database_file=database_file,
            contents=contents,
            absent=absent,
            files={
                path.relative_to(folder).as_posix(): sealed.file_entry(path)
                for path in sorted(folder.rglob("*"))
                if path.is_file()
            },
        )
        write_backup_manifest(folder, manifest)
        sealed.publish_directory(folder, destination)
    return manifest


@contextmanager
def _temporary_folder(destination: Path) -> Iterator[Path]:
    """Yield a private folder beside the destination. It is deleted at the end, unless it was renamed."""
    folder = Path(tempfile.mkdtemp(dir=destination.parent, prefix=".attune-backup-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _find_outdated(settings: Settings, lost: list[Artifact]) -> list[Artifact]:
    """Return those that have no files or another folder now, and those that have come into use or out of it."""
    if not lost:
        return []
    current = {one.id: one for one in backup_database.read_live_contents(settings.database_url).artifacts}
    return [one for one in lost if current.get(one.id) != one]


def _copy_artifacts(contents: Contents, folder: Path, report: Report) -> dict[str, str]:
    """Copy the folders of versions and reward models. Returns those that have no intact files, with the reason."""
    absent: dict[str, str] = {}
    for number, artifact in enumerate(contents.artifacts, 1):
        try:
            _copy_artifact(artifact, folder / artifact.path, f"files, {number} of {len(contents.artifacts)}", report)
        except (DamagedAdapter, FileNotFoundError) as error:
            shutil.rmtree(folder / artifact.path, ignore_errors=True)
            absent[artifact.path] = str(error)
    return absent


def _copy_artifact(artifact: Artifact, target: Path, what: str, report: Report) -> None:
    """Copy a sealed folder. Raises DamagedAdapter or FileNotFoundError if it is not what was sealed."""
    source = Path(artifact.source)
    entries, _ = sealed.read_manifest(source, artifact.manifest_sha256)
    done, total = 0, sum(entry["size"] for entry in entries.values())

    def add(size: int) -> None:
        nonlocal done
        done += size
        report(what, done, total)

    for name, entry in entries.items():
        if copy_file(source / name, target / name, add) != entry:
            raise DamagedAdapter(f"{name} in {source} differs from the hash or size in its {sealed.MANIFEST}.")
    copy_file(source / sealed.MANIFEST, target / sealed.MANIFEST, lambda size: None)
    sealed.read_manifest(target, artifact.manifest_sha256)


def _describe_lost(lost: list[Artifact], absent: dict[str, str]) -> str:
    reasons = "; ".join(f"{artifact.kind} {artifact.name}: {absent[artifact.path]}" for artifact in lost)
    return f"files that the database names are missing or damaged: {reasons} (--incomplete backs up without them)"


def verify_backup(folder: Path, report: Report) -> tuple[BackupManifest, list[str]]:
    """Check every file of the backup. Returns its manifest, and what is wrong. Raises BackupError without one."""
    manifest = read_backup_manifest(folder)
    return manifest, list(find_problems(folder, manifest, report))


def restore_backup(settings: Settings, folder: Path, report: Report) -> BackupManifest:
    """Restore a backup into the empty home and database of `settings`. Raises BackupError.

    The database comes last. A restore that failed or was interrupted leaves no database that anything starts on, and a
    marker in the home, by which the same restore can be repeated.
    """
    manifest, problems = verify_backup(folder, report)
    if problems:
        more = f" and {len(problems) - MAX_PROBLEMS_SHOWN} more" if len(problems) > MAX_PROBLEMS_SHOWN else ""
        raise BackupError(f"the backup is damaged: {'; '.join(problems[:MAX_PROBLEMS_SHOWN])}{more}")
    _require_restorable(settings, manifest)
    home, (done, total) = settings.home.resolve(), (0, manifest.num_bytes)
    make_private_folder(home)
    marker = home / RESTORE_MARKER
    marker.touch(0o600)
    for name, entry in manifest.files.items():
        if name != manifest.database_file:
            if copy_file(folder / name, home / name, lambda size: None) != entry:
                raise BackupError(f"{name} changed while it was read: verify the backup")
            done += entry["size"]
            report("files", done, total)
    file = folder / manifest.database_file
    owner_url = settings.owner_database_url
    restore_database.restore_database(owner_url, file, manifest.contents, home, manifest.absent, report)
    grant_service(settings)
    marker.unlink()
    return manifest


def find_missing_keys(settings: Settings, manifest: BackupManifest) -> list[str]:
    """Return the names of the encryption keys that the backup's secrets need and that `settings` do not have."""
    return sorted(manifest.contents.webhook_secrets.keys() - read_cipher(settings).key_ids - {CLEAR_TEXT})


def _require_restorable(settings: Settings, manifest: BackupManifest) -> None:
    database = "sqlite" if is_sqlite(settings.database_url) else "postgresql"
    if manifest.database != database:
        raise BackupError(f"the backup is of {manifest.database}, and ATTUNE_DATABASE__URL names {database}")
    restore_database.require_known_revision(manifest.contents.schema_revision, settings.database_url)
    restore_database.require_empty_database(settings.owner_database_url)
    home = settings.home.resolve()
    if (home / RESTORE_MARKER).exists():
        _delete_restored(home, manifest)
    for name in (*ARTIFACT_FOLDERS, METRICS):
        path = home / name
        if path.exists() and any(path.iterdir()):
            raise BackupError(f"{path} is not empty: restore into an empty ATTUNE_HOME")


def _delete_restored(home: Path, manifest: BackupManifest) -> None:
    """Delete the files of this backup that a restore has left in the home."""
    for name in manifest.files.keys() - {manifest.database_file}:
        (home / name).unlink(missing_ok=True)
    for top in (*ARTIFACT_FOLDERS, METRICS):
        for path in sorted((home / top).rglob("*"), reverse=True):  # children before their folders
            if path.is_dir() and not any(path.iterdir()):
                path.rmdir()
