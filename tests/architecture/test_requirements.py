"""The locked requirements are complete, have hashes, and name no index."""

import re
import tomllib
from importlib.metadata import PackageNotFoundError, requires

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from app.core.settings import REPOSITORY

FOLDER = REPOSITORY / "requirements"
LOCKS = sorted(path.stem for path in FOLDER.glob("*.in"))
PIN = re.compile(r"^([\w.-]+)==([\w.!+]+)", re.MULTILINE)


def pins(name: str) -> dict[str, str]:
    return {canonicalize_name(package): version for package, version in PIN.findall((FOLDER / name).read_text())}


@pytest.mark.parametrize("lock", LOCKS)
def test_every_pin_has_hashes_and_no_index_is_named(lock: str) -> None:
    assert pins(f"{lock}.txt") == pins(f"{lock}.in"), "run `make lock`"
    text = (FOLDER / f"{lock}.txt").read_text()
    blocks = re.split(r"\n(?=\S)", text.partition("\n\n")[2] or text)
    without = [block.split()[0] for block in blocks if "==" in block and "--hash=sha256:" not in block]
    assert not without
    assert not re.search(r"://|--(?:extra-)?index|--find-links|--trusted-host", text)


def direct_dependencies() -> set[str]:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    texts = [*project["dependencies"], *(text for extra in project["optional-dependencies"].values() for text in extra)]
    return {str(canonicalize_name(Requirement(text).name)) for text in texts} - {project["name"]}


def test_lock_of_the_main_environment_is_complete() -> None:
    """It is installed without dependencies, so one that it does not name would be missing at run time."""
    locked = {*pins("attune.txt"), *pins("torch.txt"), "pip"}
    missing = {name: "pyproject.toml" for name in direct_dependencies() - locked}
    for package in sorted(locked):
        try:
            needed = requires(package) or []
        except PackageNotFoundError:
            continue  # of another platform
        for requirement in map(Requirement, needed):
            is_needed = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
            name = canonicalize_name(requirement.name)
            if is_needed and name not in locked and not name.startswith(("nvidia-", "cuda-", "triton")):
                missing[name] = package
    assert not missing
