"""Environments of clients are installed once, also where several processes of a run need one at the same time."""

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.clients.third_party import environments


def test_an_environment_that_two_need_at_once_is_installed_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pins" / "client").mkdir(parents=True)
    (tmp_path / "pins" / "client" / "requirements.txt").write_text("package==1\n")
    commands: list[str] = []

    def install(command: list[str], folder: Path) -> None:
        commands.append(command[1])
        time.sleep(0.05)
        (folder / "bin").mkdir(exist_ok=True)

    monkeypatch.setattr(environments, "CACHE", tmp_path / "cache")
    monkeypatch.setattr(environments, "_run_installer", install)
    with ThreadPoolExecutor(4) as threads:
        folders = list(threads.map(lambda _: environments.prepare("client", tmp_path / "pins"), range(4)))
    assert len(set(folders)) == 1 and folders[0].is_dir()
    assert commands == ["-m", "install"]
