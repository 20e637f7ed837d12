"""Retention of files: those of old versions, the trainer's state of versions that nothing trains from, and logs.

A version whose files are deleted keeps its row, with `pruned_at`, and cannot be deployed any more. Files go after the
commit that marks the row; what a crash leaves behind goes with the next step.
"""

import asyncio
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from alignment.artifacts import manifest
from alignment.artifacts.specs import TRAINER_STATE
from alignment.errors import DamagedAdapter
from app.core.database import Database, chunked, now
from app.core.settings import Settings
from app.deployments.policy_states import POLICY_DELETED
from app.engines import episode_pins
from app.models import (
    PENDING_RELEASE,
    AuditAction,
    Batch,
    BatchState,
    Pin,
    Policy,
    RewardModel,
    RewardModelState,
    Sample,
    SampleRule,
    SampleState,
    Version,
)
from app.policies import repository
from app.policies.locks import lock_policy
from app.policies.references import version_name
from app.policies.service import audit_policy
from app.privacy.expired_rows import SECONDS_PER_DAY
from app.training import unlearning
from app.training.vote_totals import reopen_votes_on_turns

MAX_VERSIONS = 20  # of a policy in one step
MAX_SAMPLES = 200  # of a deleted policy in one step
PRUNED = ".pruned"  # the suffix of a folder that is being deleted
COPY_SECONDS = 3600.0  # a copy without the trainer state takes seconds: its files are links
WITHOUT_STATE = ".weights"  # the suffix of a version's folder whose trainer state is deleted
log = logging.getLogger("attune.retention")
_damaged: set[Path] = set()  # folders that differ from their manifests, so that they are not read in every step


async def find_used(session: AsyncSession, policy: Policy, ancestors: int) -> set[str]:
    """Return the versions whose files are needed, however old they are.

    These serve, have served before, are the canary, are pinned, also by open episodes, or wait for their release; the
    head; the parents of open batches; and the last ancestors of what serves, to which a rollback returns.
    """
    deployment = await repository.get_deployment(session, policy.id)
    used = {deployment.version_id, deployment.previous_version_id, deployment.canary_version_id, policy.head_version_id}
    pinned = select(Pin.version_id).where(Pin.policy_id == policy.id)
    pending = select(Version.id).where(Version.policy_id == policy.id, Version.state.in_(PENDING_RELEASE))
    parents = select(Batch.parent_id).where(Batch.policy_id == policy.id, Batch.state == BatchState.OPEN)
    for query in (pinned.distinct(), pending, parents.distinct(), episode_pins.select_pinned_versions(policy.id)):
        used |= set(await session.scalars(query))
    used |= {version.id for version in await repository.list_ancestors(session, deployment.version_id, ancestors)}
    return {id for id in used if id is not None}


async def select_prunable(
    session: AsyncSession, policy: Policy, keep: int, settings: Settings, limit: int | None = None
) -> list[Version]:
    """Return the versions whose files may go: all but the newest `keep` and those that are used, the oldest first."""
    used = await find_used(session, policy, settings.release.keep_versions)
    has_files = (Version.policy_id == policy.id, Version.adapter_path.is_not(None), Version.pruned_at.is_(None))
    newest = select(Version.number).where(*has_files).order_by(Version.number.desc()).offset(keep).limit(1)
    first_old = await session.scalar(newest)
    if first_old is None:
        return []
    old = select(Version).where(*has_files, Version.number <= first_old, Version.id.not_in(used))
    return list(await session.scalars(old.order_by(Version.number).limit(limit)))


async def prune_versions(
    db: Database, policy_id: str, keep: int, settings: Settings, *, actor: str, limit: int = MAX_VERSIONS
) -> tuple[list[str], int]:
    """Delete the files of up to `limit` old versions; return their names and the number of bytes."""
    async with db.write() as session:
        policy = (await lock_policy(session, policy_id)).policy
        versions = await select_prunable(session, policy, keep, settings, limit)
        for version in versions:
            version.pruned_at = now()
            audit_policy(session, policy, AuditAction.VERSION_PRUNED, actor, subject=version)
        names = [version_name(policy, version) for version in versions]
    num_bytes = await asyncio.to_thread(remove_folders, [version.adapter_path for version in versions], settings)
    return names, num_bytes


async def remove_deleted(db: Database, policy_id: str, settings: Settings, *, actor: str) -> int:
    """Remove one step of what a deleted policy leaves: samples that wait, and the files of versions and reward models.

    Returns the number of rows that changed.
    """
    async with db.write() as session:
        policy = (await lock_policy(session, policy_id)).policy
        states = (SampleState.OPEN, SampleState.QUARANTINED)
        waiting = (Sample.policy_id == policy_id, Sample.state.in_(states))
        samples = select(Sample.turn_id).where(*waiting).order_by(Sample.turn_id)
        turn_ids = list(await session.scalars(samples.limit(MAX_SAMPLES)))
        await unlearning.drop_samples(session, turn_ids, states, SampleRule.EXCLUDED, POLICY_DELETED)
        await reopen_votes_on_turns(session, turn_ids)
        has_files = (Version.policy_id == policy_id, Version.adapter_path.is_not(None), Version.pruned_at.is_(None))
        oldest = select(Version).where(*has_files).order_by(Version.number).limit(MAX_VERSIONS)
        versions = list(await session.scalars(oldest))
        for version in versions:
            version.pruned_at = now()
            audit_policy(session, policy, AuditAction.VERSION_PRUNED, actor, POLICY_DELETED, subject=version)
        fitted = (RewardModel.policy_id == policy_id, RewardModel.path.is_not(None))
        first_models = select(RewardModel).where(*fitted).order_by(RewardModel.number).limit(MAX_VERSIONS)
        models = list(await session.scalars(first_models))
        paths = [model.path for model in models]
        for model in models:
            model.path, model.state, model.reason = None, RewardModelState.DISABLED, POLICY_DELETED
    await asyncio.to_thread(remove_folders, [version.adapter_path for version in versions], settings)
    await asyncio.to_thread(remove_folders, paths, settings, settings.reward_models_dir)
    return len(turn_ids) + len(versions) + len(models)


async def remove_leftovers(db: Database, settings: Settings) -> int:
    """Delete the folders that a crash has left behind; return their bytes."""
    await asyncio.to_thread(remove_partial, settings)
    folders = await asyncio.to_thread(list_folders, settings)
    bases = {str(folder).removesuffix(WITHOUT_STATE) for folder in folders}
    is_pruned: dict[str, bool] = {}
    async with db.read() as session:
        for paths in chunked(bases | {base + WITHOUT_STATE for base in bases}):
            query = select(Version.adapter_path, Version.pruned_at).where(Version.adapter_path.in_(paths))
            is_pruned |= {path: pruned_at is not None for path, pruned_at in await session.execute(query) if path}
    left = [str(folder) for folder in folders if _is_leftover(str(folder), is_pruned)]
    return await asyncio.to_thread(remove_folders, left, settings)


def _is_leftover(path: str, is_pruned: Mapping[str, bool]) -> bool:
    """Return whether no version needs the folder. A folder that no version has ever had is not retention's to delete.

    Args:
        is_pruned: By the path of each version, whether the version is pruned.
    """
    base = path.removesuffix(WITHOUT_STATE)
    if path in is_pruned:
        return is_pruned[path]
    return is_pruned.get(base, False) if path != base else base + WITHOUT_STATE in is_pruned


def list_folders(settings: Settings) -> list[Path]:
    """Return the folders of versions. Those whose names begin with a dot are being written or deleted."""
    if not settings.versions_dir.is_dir():
        return []
    return [path for path in settings.versions_dir.iterdir() if path.is_dir() and not path.name.startswith(".")]


def remove_partial(settings: Settings) -> None:
    """Finish the deletions that were interrupted, and delete the copies that were not finished within an hour."""
    for path in settings.versions_dir.glob(f".*{PRUNED}"):
        shutil.rmtree(path, ignore_errors=True)
    for path in settings.versions_dir.glob(f".*{WITHOUT_STATE}-*"):
        with suppress(FileNotFoundError):
            if path.stat().st_mtime < time.time() - COPY_SECONDS:
                shutil.rmtree(path, ignore_errors=True)


def remove_folders(paths: Iterable[str | None], settings: Settings, within: Path | None = None) -> int:
    """Delete these folders of versions, or of what else is `within` a folder; return their bytes.

    A folder disappears at once.
    """
    within, num_bytes = within or settings.versions_dir, 0
    for path in filter(None, paths):
        folder = Path(path).resolve()
        if folder.is_dir() and folder.is_relative_to(within) and folder != within:
            removed = folder.with_name(f".{folder.name}{PRUNED}")
            shutil.rmtree(removed, ignore_errors=True)  # of a deletion that was interrupted
            size = folder_bytes(folder)
            with suppress(FileNotFoundError):  # another process deletes it
                folder.rename(removed)
                num_bytes += size
                shutil.rmtree(removed, ignore_errors=True)
    return num_bytes


def folder_bytes(folder: Path) -> int:
    """Return the bytes of the folder's files; a folder or a file that disappears meanwhile has none."""
    num_bytes = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with suppress(FileNotFoundError):
                num_bytes += os.lstat(os.path.join(parent, name)).st_size
    return num_bytes


async def select_with_state(session: AsyncSession, policy: Policy, keep: int, settings: Settings) -> list[Version]:
    """Return the versions whose trainer state may go: all but the newest `keep` and those that are used."""
    versions = await select_prunable(session, policy, keep, settings)
    return await asyncio.to_thread(lambda: [version for version in versions if _has_state(version)])


def _has_state(version: Version) -> bool:
    return version.adapter is not None and (Path(version.adapter_path or "") / TRAINER_STATE).is_dir()


async def remove_trainer_states(
    db: Database, policy_id: str, keep: int, settings: Settings, *, limit: int = MAX_VERSIONS
) -> int:
    """Delete the trainer state of up to `limit` old versions; return the number of bytes.

    A version never changes, so each gets another folder without the state and a manifest of its own. Training from it
    later begins with a new optimizer. A version whose other files are damaged is logged and keeps its folder.
    """
    async with db.read() as session:
        policy = await session.get_one(Policy, policy_id)
        versions = await select_with_state(session, policy, keep, settings)
    folders = {version.id: Path(version.adapter_path or "").resolve() for version in versions}
    sound = [version for version in versions if folders[version.id] not in _damaged]
    num_bytes = 0
    for version in sound[:limit]:
        folder = folders[version.id]
        if not folder.is_relative_to(settings.versions_dir):
            continue
        try:
            copy, sha256 = await asyncio.to_thread(copy_without_state, folder, version.manifest_sha256)
        except (DamagedAdapter, OSError) as error:
            log.warning("the trainer state of %s is kept: %s", folder.name, error)
            _damaged.add(folder)
            continue
        is_replaced = await _replace_folder(db, policy_id, version.id, folder, copy, sha256, settings)
        num_bytes += await asyncio.to_thread(_remove_one, folder, copy, is_replaced, settings)
    return num_bytes


async def _replace_folder(
    db: Database, policy_id: str, version_id: str, folder: Path, copy: Path, sha256: str, settings: Settings
) -> bool:
    """Make the copy the folder of the version; return False if the version is used or has changed meanwhile."""
    async with db.write() as session:
        policy = (await lock_policy(session, policy_id)).policy
        row = await session.get_one(Version, version_id, populate_existing=True)
        is_changed = row.pruned_at is not None or row.adapter_path != str(folder)
        if is_changed or row.id in await find_used(session, policy, settings.release.keep_versions):
            return False
        row.adapter_path, row.manifest_sha256 = str(copy), sha256
        return True


def _remove_one(folder: Path, copy: Path, is_replaced: bool, settings: Settings) -> int:
    """Delete the folder that was replaced, or the copy that was not needed; return the bytes that this frees."""
    if not is_replaced:
        remove_folders([str(copy)], settings)
        return 0
    return remove_folders([str(folder)], settings) - folder_bytes(copy)


def copy_without_state(folder: Path, manifest_sha256: str | None = None) -> tuple[Path, str]:
    """Copy a version's folder without its trainer state; return the copy and the hash of its manifest.

    Raises DamagedAdapter if the manifest has another hash than the recorded one, or if other files than the state
    differ from it. The files of the copy are links to the same data.
    """
    lineage = manifest.verify(folder, manifest_sha256, skip=TRAINER_STATE)
    final = folder.with_name(folder.name + WITHOUT_STATE)
    shutil.rmtree(final, ignore_errors=True)  # of an attempt that was not committed
    temporary = Path(tempfile.mkdtemp(prefix=f".{final.name}-", dir=folder.parent))
    try:
        for path in sorted(folder.rglob("*")):
            relative = path.relative_to(folder)
            if path.is_file() and relative.parts[0] not in (TRAINER_STATE, manifest.MANIFEST):
                (temporary / relative).parent.mkdir(parents=True, exist_ok=True)
                os.link(path, temporary / relative)
        temporary.chmod(0o755)
        sha256 = manifest.write_manifest(temporary, lineage)
        (temporary / manifest.MANIFEST).chmod(0o644)
        manifest.publish_directory(temporary, final)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return final, sha256


def list_old_logs(settings: Settings, days: float) -> Sequence[Path]:
    """Return the log files with content that nothing has been written to for so many days."""
    if not settings.logs_dir.is_dir():
        return []
    before = time.time() - days * SECONDS_PER_DAY
    found = ((path, path.stat()) for path in sorted(settings.logs_dir.iterdir()) if path.is_file())
    return [path for path, status in found if status.st_size > 0 and status.st_mtime < before]


def empty_logs(settings: Settings, days: float) -> int:
    """Empty the old log files; return how many.

    They are not deleted, since a quiet process may have its log open, and would go on writing to a file that has gone.
    """
    logs = list_old_logs(settings, days)
    for path in logs:
        with suppress(FileNotFoundError):
            os.truncate(path, 0)
    return len(logs)


def total_bytes(paths: Iterable[str | None]) -> int:
    """Return the bytes of these folders; one that is missing has none."""
    return sum(folder_bytes(Path(path)) for path in paths if path is not None)
