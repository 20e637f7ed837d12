"""The wheel of attune-client in a bare environment, with httpx and what httpx needs, against a live service."""

import shutil
import subprocess
import sys
import venv
import zipfile
from collections import Counter
from importlib.metadata import Distribution, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from app.core.settings import REPOSITORY
from app.models import Feedback
from tests.support.deployment import Harness

SOURCE = REPOSITORY / "clients" / "python"
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel from a copy, since setuptools writes into the source."""
    source, out = tmp_path_factory.mktemp("source") / "client", tmp_path_factory.mktemp("wheel")
    shutil.copytree(SOURCE, source, ignore=shutil.ignore_patterns("build", "*.egg-info", "__pycache__"))
    subprocess.run([*PIP, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", out, source], check=True)
    [path] = out.glob("*.whl")
    return path


@pytest.fixture
def bare_python(tmp_path: Path) -> Path:
    """Return the Python of an environment that has httpx alone, copied from this one: no network is needed."""
    venv.create(tmp_path / "bare", with_pip=False)
    [site_packages] = (tmp_path / "bare").glob("lib/python*/site-packages")
    for package in closure("httpx"):
        for file in package.files or ():
            if ".." not in file.parts:
                target = site_packages / file
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(str(package.locate_file(file)), target)
    return tmp_path / "bare" / "bin" / "python"


def closure(name: str) -> list[Distribution]:
    """Return a distribution and all that it needs, without extras."""
    found: dict[str, Distribution] = {}
    names = [name]
    while names:
        package = distribution(names.pop())
        if package.name.lower() in found:
            continue
        found[package.name.lower()] = package
        requirements = [Requirement(line) for line in package.requires or ()]
        names += [each.name for each in requirements if each.marker is None or each.marker.evaluate({"extra": ""})]
    return list(found.values())


def test_wheel_has_the_package_and_nothing_else(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    modules = {f"attune_client/{path.name}" for path in (SOURCE / "attune_client").glob("*.py")}
    assert {name for name in names if ".dist-info/" not in name} == modules | {"attune_client/py.typed"}
    assert any(name.endswith("licenses/LICENSE") for name in names)


async def test_wheel_works_without_attune(wheel: Path, bare_python: Path, url: str, harness: Harness) -> None:
    # --no-index: pip fails if the wheel needs anything beyond httpx.
    subprocess.run([*PIP, "--python", bare_python, "install", "--no-index", wheel], check=True)
    program = Path(__file__).with_name("smoke_program.py")
    environment = {"ATTUNE_URL": url, "ATTUNE_API_KEY": harness.key}
    result = subprocess.run([bare_python, "-I", program], env=environment, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0 and str(bare_python.parents[1]) in result.stdout, result.stdout + result.stderr
    kinds = Counter(row.kind for row in await harness.all(Feedback))
    assert kinds == {"binary": 2, "rating": 1, "comparison": 1, "comment": 1, "correction": 1}
