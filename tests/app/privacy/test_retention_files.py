"""Retention of files: which versions lose them, and that such a version is refused."""

import os
import time
from pathlib import Path

from alignment.artifacts import manifest
from app.models import Batch, BatchState, Episode, Pin, PinKind, Version, VersionState
from app.privacy import retention_files
from tests.support import episodes
from tests.support.deployment import Harness
from tests.support.trained_versions import create_batch, publish
from workers.retention import remove_expired

PRUNE = "/v1/policies/shop/versions/prune"


async def write_files(harness: Harness, version: Version) -> Path:
    """Write a version's folder with an adapter and a trainer state."""
    folder = harness.settings.versions_dir / f"v{version.number}"
    (folder / "trainer").mkdir(parents=True)
    (folder / "adapter_model.safetensors").write_bytes(b"a" * 1000)
    (folder / "trainer" / "state.json").write_bytes(b"s" * 5000)
    sha256 = manifest.write_manifest(folder, {"number": version.number})
    async with harness.db.write() as session:
        row = await session.get_one(Version, version.id)
        row.adapter_path, row.manifest_sha256 = str(folder), sha256
    return folder


async def release(harness: Harness, count: int) -> list[Path]:
    """Publish versions 1 to `count`, each with files."""
    return [await write_files(harness, await publish(harness)) for _ in range(count)]


async def test_old_versions_lose_their_files_and_are_refused(harness: Harness) -> None:
    rejected = await write_files(harness, await harness.version(VersionState.REJECTED))
    folders = await release(harness, 8)
    dry = (await harness.api.post(PRUNE, json={"keep": 1, "dry_run": True})).json()
    assert dry["versions"] == [f"shop@v{number}" for number in (1, 2, 3, 4)]
    assert all(folder.exists() for folder in (rejected, *folders))
    body = (await harness.api.post(PRUNE, json={"keep": 1})).json()
    assert (body["versions"], body["bytes"]) == (dry["versions"], dry["bytes"]) and body["bytes"] > 6000
    gone = {name for name in body["versions"]}
    for number, folder in enumerate((rejected, *folders), start=1):
        assert folder.exists() == (f"shop@v{number}" not in gone)
    answer = await harness.api.post("/v1/policies/shop/deploy", json={"version": 2})
    assert answer.status_code == 409 and answer.json()["error"]["code"] == "version_pruned", answer.text
    assert (await harness.api.post(PRUNE, json={"keep": 1})).json()["versions"] == []


async def test_versions_in_use_keep_their_files(harness: Harness) -> None:
    await release(harness, 10)
    versions = {row.number: row for row in await harness.all(Version)}
    policy, turn = await harness.policy(), await harness.turn()
    batch = await create_batch(harness, turn, parent_id=versions[2].id)
    async with harness.db.write() as session:
        pin = {"project_id": policy.project_id, "policy_id": policy.id, "actor": "sk", "kind": PinKind.USER}
        session.add(Pin(id="pin-1", subject="bob", version_id=versions[1].id, **pin))
        (await session.get_one(Version, versions[3].id)).state = VersionState.SHADOW
    episode = await episodes.create(harness, version="pin")
    async with harness.db.write() as session:
        (await session.get_one(Episode, episode["id"])).start_version_id = versions[4].id
    names = (await harness.api.post(PRUNE, json={"keep": 1, "dry_run": True})).json()["versions"]
    ancestors = harness.settings.release.keep_versions  # of version 10, which serves
    assert names == [f"shop@v{number}" for number in range(5, 10 - ancestors)]
    await episodes.end(harness, episode["id"])
    async with harness.db.write() as session:
        (await session.get_one(Batch, batch.id)).state = BatchState.FAILED
    names = (await harness.api.post(PRUNE, json={"keep": 1, "dry_run": True})).json()["versions"]
    assert names == ["shop@v2", *(f"shop@v{number}" for number in range(4, 10 - ancestors))]


async def test_folder_outside_of_the_home_is_not_deleted(harness: Harness, tmp_path: Path) -> None:
    outside = tmp_path / "elsewhere"
    outside.mkdir()
    assert retention_files.remove_folders([str(outside)], harness.settings) == 0 and outside.exists()


async def test_folder_that_a_crash_left_behind_is_deleted(harness: Harness) -> None:
    await write_files(harness, await harness.version(VersionState.REJECTED))
    await release(harness, 7)
    [left, *_] = (await harness.api.post(PRUNE, json={"keep": 1})).json()["versions"]
    assert left == "shop@v1"
    folder = harness.settings.versions_dir / "v1"
    folder.mkdir()
    await remove_expired(harness.db, harness.settings)
    assert not folder.exists()


async def test_interrupted_deletions_are_finished(harness: Harness) -> None:
    """Each folder is where a process may have been killed; one that no version names may belong to a new version."""
    folders = await release(harness, 3)
    versions = harness.settings.versions_dir
    copy, sha256 = retention_files.copy_without_state(folders[1])
    orphan, _ = retention_files.copy_without_state(folders[0])
    async with harness.db.write() as session:
        rows = {row.number: row for row in await harness.all(Version)}
        (await session.get_one(Version, rows[2].id)).adapter_path = str(copy)
        (await session.get_one(Version, rows[2].id)).manifest_sha256 = sha256
        (await session.get_one(Version, rows[1].id)).pruned_at = 1.0
    (versions / ".v9.pruned" / "trainer").mkdir(parents=True)
    new, writing = versions / "v10", versions / ".v11.weights-abc"
    new.mkdir()
    writing.mkdir()
    stale = versions / ".v12.weights-abc"
    stale.mkdir()
    os.utime(stale, (1.0, 1.0))
    await remove_expired(harness.db, harness.settings)
    assert orphan.name == "v1.weights"
    assert set(versions.iterdir()) == {copy, folders[2], new, writing}


async def test_damaged_version_keeps_its_trainer_state_and_does_not_stop_others(harness: Harness) -> None:
    folders = await release(harness, 8)
    assert (await harness.api.put("/v1/retention", json={"optimizer_states": 1})).status_code == 200
    (folders[0] / "adapter_model.safetensors").write_bytes(b"damaged")
    await remove_expired(harness.db, harness.settings)
    assert [(folder / "trainer").exists() for folder in folders[:4]] == [True, False, False, True]


async def test_damaged_trainer_state_is_removed_like_any_other(harness: Harness) -> None:
    folders = await release(harness, 8)
    assert (await harness.api.put("/v1/retention", json={"optimizer_states": 1})).status_code == 200
    (folders[0] / "trainer" / "state.json").write_bytes(b"damaged")
    (folders[1] / "trainer" / "state.json").unlink()
    await remove_expired(harness.db, harness.settings)
    for row in sorted(await harness.all(Version), key=lambda row: row.number)[1:4]:
        folder = Path(row.adapter_path)
        manifest.verify(folder, row.manifest_sha256)
        assert (folder / "adapter_model.safetensors").exists() and not (folder / "trainer").exists()


async def test_old_versions_lose_their_trainer_state(harness: Harness) -> None:
    await release(harness, 8)
    assert (await harness.api.put("/v1/retention", json={"optimizer_states": 1})).status_code == 200
    await remove_expired(harness.db, harness.settings)
    without = []
    for row in sorted(await harness.all(Version), key=lambda row: row.number):
        if row.adapter_path is not None:
            folder = Path(row.adapter_path)
            manifest.verify(folder, row.manifest_sha256)
            assert (folder / "adapter_model.safetensors").read_bytes() == b"a" * 1000
            if not (folder / "trainer").exists():
                without.append(row.number)
    assert without == [1, 2, 3]
    assert len(list(harness.settings.versions_dir.iterdir())) == 8


async def test_logs_that_nobody_writes_to_are_emptied(harness: Harness) -> None:
    logs = harness.settings.logs_dir
    logs.mkdir(parents=True)
    for name in ("old.log", "young.log"):
        (logs / name).write_text(name)
    with (logs / "old.log").open("ab", buffering=0) as of_a_quiet_process:
        long_ago = time.time() - 31 * 86_400
        os.utime(logs / "old.log", (long_ago, long_ago))
        await remove_expired(harness.db, harness.settings)
        assert {path.name: path.read_text() for path in logs.iterdir()} == {"old.log": "", "young.log": "young.log"}
        of_a_quiet_process.write(b"its last words")
    assert (logs / "old.log").read_text() == "its last words"
