"""The Dockerfile, as far as it can be read without building it."""

import re
import subprocess
import sys
import tomllib
from fnmatch import fnmatch
from pathlib import Path

import pytest

from app.core.settings import REPOSITORY, Settings
from tests.docker.files import DOCKERFILE, compose, roles, steps


def of(stage: str, verb: str) -> list[str]:
    return [step.rest for step in steps() if (step.stage, step.verb) == (stage, verb)]


def test_the_stages_are_those_that_compose_builds() -> None:
    stages = {step.stage for step in steps()}
    built = [service["build"] for service in compose()["services"].values() if "build" in service]
    assert {build["target"] for build in built} == stages == {"attune", "engine"}
    assert {(DOCKERFILE.parent / build["context"]).resolve() for build in built} == {REPOSITORY}
    assert {REPOSITORY / build["dockerfile"] for build in built} == {DOCKERFILE}
    images = {service["image"] for service in compose()["services"].values() if "build" in service}
    assert {service["image"] for service in roles().values()} == images, (
        "somebody waits for an image that nobody builds"
    )


def test_the_base_is_pinned_to_a_patch_and_to_a_release_of_the_system() -> None:
    [base] = [step.rest for step in steps() if step.verb == "FROM" and step.stage == "attune"]
    assert re.fullmatch(r"python:3\.11\.\d+-slim-bookworm AS attune", base)


def test_all_that_is_copied_exists_and_is_not_ignored() -> None:
    ignored = (REPOSITORY / ".dockerignore").read_text().split()
    for step in steps():
        if step.verb == "COPY":
            *sources, _ = step.rest.split()
            for source in sources:
                assert (REPOSITORY / source).exists(), f"{source} is not there"
                assert not any(fnmatch(source, pattern) for pattern in ignored)


def test_every_package_of_ours_is_copied() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
    packages = {pattern.rstrip("*") for pattern in project["tool"]["setuptools"]["packages"]["find"]["include"]}
    assert packages <= {rest.split()[0] for rest in of("attune", "COPY")}
    assert of("attune", "ENTRYPOINT") == ['["attune"]'] and "attune" in project["project"]["scripts"]


def test_what_changes_seldom_comes_before_our_lines() -> None:
    verbs = [(step.verb, step.rest) for step in steps() if step.stage == "attune"]
    torch = next(n for n, (verb, rest) in enumerate(verbs) if verb == "RUN" and "torch==" in rest)
    copies = [n for n, (verb, rest) in enumerate(verbs) if verb == "COPY" and not rest.startswith("requirements/")]
    assert torch < min(copies)


@pytest.mark.parametrize("stage", ["attune", "engine"])
def test_nobody_runs_as_root(stage: str) -> None:
    assert of(stage, "USER")[-1] == "10001"


def test_the_volumes_lie_where_the_user_may_write() -> None:
    made = " ".join(of("attune", "RUN"))
    mounted = {volume.partition(":")[2] for volume in roles()["api"]["volumes"]}
    assert mounted == {"/data", "/home/attune/.cache/huggingface"}
    assert f"mkdir -p {' '.join(sorted(mounted))}" in made and "chown -R attune:attune /data" in made


def test_the_environment_is_made_of_settings() -> None:
    names = {name for rest in of("attune", "ENV") for name in re.findall(r"(ATTUNE_\w+)=", rest)}
    assert names == {"ATTUNE_HOME"} <= {f"ATTUNE_{name.upper()}" for name in Settings.model_fields}


def test_torch_and_sglang_are_those_of_make_setup() -> None:
    pins = re.findall(r"(?:torch|sglang|torchvision)==[\d.]+", (REPOSITORY / "Makefile").read_text())
    assert set(re.findall(r"(?:torch|sglang|torchvision)==[\d.]+", DOCKERFILE.read_text())) == set(pins)


def test_hadolint_finds_nothing() -> None:
    hadolint = Path(sys.executable).with_name("hadolint")
    done = subprocess.run([hadolint, str(DOCKERFILE)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
