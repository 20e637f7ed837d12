"""A private file appears complete, once, and whatever goes wrong leaves nothing that stands in the way of the next."""

import errno
import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from app.core.private_files import create_once


def test_file_is_created_once_and_only_its_owner_may_read_it(tmp_path: Path) -> None:
    path = tmp_path / "home" / "key"
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda number: create_once(path, lambda: f"content {number}"), range(32)))
    first = path.read_text()
    assert first.startswith("content ") and stat.S_IMODE(path.stat().st_mode) == 0o600
    create_once(path, lambda: "another")
    assert path.read_text() == first and list(path.parent.iterdir()) == [path]


def test_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    path = tmp_path / "key"
    with monkeypatch.context() as full, pytest.raises(OSError, match="No space"):
        full.setattr(os, "fsync", fail)
        create_once(path, lambda: "content")
    assert list(tmp_path.iterdir()) == []
    create_once(path, lambda: "content")
    assert path.read_text() == "content"
