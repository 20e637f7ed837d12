"""A directory with a manifest is verified byte for byte."""

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from alignment.artifacts.manifest import MANIFEST, publish_directory, verify, write_manifest
from alignment.errors import DamagedAdapter


@pytest.fixture
def directory_with_manifest(tmp_path: Path) -> Path:
    directory = tmp_path / "version"
    (directory / "trainer").mkdir(parents=True)
    (directory / "weights").write_bytes(bytes(range(256)) * 16)
    (directory / "trainer" / "state.json").write_text("{}")
    write_manifest(directory, {"parent": 3})
    return directory


def flip_a_bit(directory: Path) -> None:
    raw = bytearray((directory / "weights").read_bytes())
    raw[1000] ^= 4
    (directory / "weights").write_bytes(raw)


def truncate(directory: Path) -> None:
    (directory / "weights").write_bytes((directory / "weights").read_bytes()[:-1])


def zero_the_tail(directory: Path) -> None:
    raw = (directory / "weights").read_bytes()
    (directory / "weights").write_bytes(raw[:-512] + bytes(512))


def remove(directory: Path) -> None:
    (directory / "trainer" / "state.json").unlink()


def add(directory: Path) -> None:
    (directory / "trainer" / "more").write_text("")


def add_next_to_it(directory: Path) -> None:
    (directory / "trainer-notes").write_text("")


def truncate_the_manifest(directory: Path) -> None:
    (directory / MANIFEST).write_bytes((directory / MANIFEST).read_bytes()[:-20])


def delete_manifest(directory: Path) -> None:
    (directory / MANIFEST).unlink()


def replace_the_manifest_by_an_empty_list(directory: Path) -> None:
    (directory / MANIFEST).write_text("[]")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (flip_a_bit, "weights"),
        (truncate, "weights"),
        (zero_the_tail, "weights"),
        (remove, "trainer/state.json is missing"),
        (add, "trainer/more"),
        (truncate_the_manifest, "manifest"),
        (delete_manifest, "manifest"),
        (replace_the_manifest_by_an_empty_list, "manifest"),
    ],
)
def test_damage_is_rejected_and_names_the_file(
    directory_with_manifest: Path, damage: Callable[[Path], None], message: str
) -> None:
    damage(directory_with_manifest)
    with pytest.raises(DamagedAdapter, match=message):
        verify(directory_with_manifest)


@pytest.mark.parametrize("damage", [remove, add])
def test_a_skipped_folder_may_be_damaged(directory_with_manifest: Path, damage: Callable[[Path], None]) -> None:
    damage(directory_with_manifest)
    assert verify(directory_with_manifest, skip="trainer") == {"parent": 3}
    add_next_to_it(directory_with_manifest)
    with pytest.raises(DamagedAdapter, match="trainer-notes"):
        verify(directory_with_manifest, skip="trainer")


@pytest.mark.parametrize("damage", [flip_a_bit, truncate, truncate_the_manifest])
def test_damage_outside_of_a_skipped_folder_is_rejected(
    directory_with_manifest: Path, damage: Callable[[Path], None]
) -> None:
    damage(directory_with_manifest)
    with pytest.raises(DamagedAdapter):
        verify(directory_with_manifest, skip="trainer")


def test_missing_version_is_damage_and_missing_storage_is_not(directory_with_manifest: Path, tmp_path: Path) -> None:
    with pytest.raises(DamagedAdapter, match="has no manifest"):
        verify(tmp_path / "another")
    with pytest.raises(FileNotFoundError, match="not_mounted"):
        verify(tmp_path / "not_mounted" / "version")


@pytest.mark.parametrize(("module", "function"), [(Path, "read_bytes"), (os, "scandir")])
def test_unreadable_storage_is_not_damage(
    directory_with_manifest: Path, monkeypatch: pytest.MonkeyPatch, module: object, function: str
) -> None:
    def fail(path: Path) -> None:
        raise OSError(errno.ESTALE, "Stale file handle")

    monkeypatch.setattr(module, function, fail)
    with pytest.raises(OSError, match="Stale"):
        verify(directory_with_manifest)


def test_verify_returns_the_lineage(directory_with_manifest: Path) -> None:
    assert verify(directory_with_manifest) == {"parent": 3}


def test_rewritten_manifest_is_rejected_by_its_hash(tmp_path: Path) -> None:
    (tmp_path / "weights").write_bytes(b"true")
    sha256 = write_manifest(tmp_path, {})
    verify(tmp_path, sha256)
    (tmp_path / "weights").write_bytes(b"false")
    write_manifest(tmp_path, {})
    verify(tmp_path)
    with pytest.raises(DamagedAdapter, match="recorded"):
        verify(tmp_path, sha256)


def test_publish_directory_moves_all_files_and_never_overwrites(directory_with_manifest: Path, tmp_path: Path) -> None:
    final = tmp_path / "shop-v1"
    publish_directory(directory_with_manifest, final)
    assert not directory_with_manifest.exists()
    assert json.loads((final / MANIFEST).read_text())["lineage"] == verify(final)
    (tmp_path / "again").mkdir()
    with pytest.raises(FileExistsError, match="never changes"):
        publish_directory(tmp_path / "again", final)
