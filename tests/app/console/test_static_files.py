"""The console's files: those of npm packages are as they were published, and a wheel holds all of them."""

import fnmatch
import hashlib
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from app.core.settings import REPOSITORY

FOLDERS = (REPOSITORY / "app/console/static/vendor", REPOSITORY / "tests/support/vendor")
NOT_VENDORED = ("VENDORED.toml", "LICENSES.txt", "LICENSE")
CONSOLE = REPOSITORY / "app" / "console"


@pytest.mark.parametrize("folder", FOLDERS, ids=["console", "tests"])
def test_vendored_files_have_the_hashes_and_licenses_of_their_list(folder: Path) -> None:
    rows = tomllib.loads((folder / "VENDORED.toml").read_text())["file"]
    hashes = {row["name"]: row["sha256"] for row in rows}
    files = [path for path in folder.iterdir() if path.name not in NOT_VENDORED]
    assert {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files} == hashes
    assert all(row["package"] and row["version"] and row["license"] for row in rows)


def test_license_of_every_vendored_package_is_in_the_folder() -> None:
    rows = tomllib.loads((FOLDERS[0] / "VENDORED.toml").read_text())["file"]
    text = (FOLDERS[0] / "LICENSES.txt").read_text()
    assert all(f"== {row['package']} (" in text for row in rows)


def console_files() -> set[str]:
    folders = (CONSOLE / "templates", CONSOLE / "static")
    return {
        path.relative_to(REPOSITORY).as_posix() for folder in folders for path in folder.rglob("*") if path.is_file()
    }


def test_package_data_names_every_file() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
    patterns = [f"app/{pattern}" for pattern in project["tool"]["setuptools"]["package-data"]["app"]]
    assert not [name for name in console_files() if not any(fnmatch.fnmatch(name, pattern) for pattern in patterns)]


@pytest.mark.slow
def test_wheel_holds_every_file(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        ".",
        "--no-deps",
        "--no-build-isolation",
        "-q",
        "-w",
        str(tmp_path),
    ]
    subprocess.run(command, cwd=REPOSITORY, check=True)
    [wheel] = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        assert console_files() <= set(archive.namelist())


def test_templates_load_nothing_from_elsewhere_and_hold_no_inline_code() -> None:
    """Pages work without a network, and under a policy that allows no inline script or style."""
    for template in (CONSOLE / "templates").glob("*.html"):
        text = template.read_text()
        assert not re.search(r"""(?:src|href|action)\s*=\s*["']?(?:https?:)?//""", text), template.name
        assert not re.search(r"""\s(?:on\w+|style|hx-on[\w:-]*)=""", text), template.name
        assert "<script>" not in text and "| safe" not in re.sub(r"'[^']*'(?: \| safe)", "", text), template.name
