"""The Dockerfile, as far as it can be tested without building it."""

import re
import subprocess
import sys
import tomllib
from fnmatch import fnmatch
from pathlib import Path

import pytest

from app.core.settings import REPOSITORY
from tests.docker.files import DOCKERFILE, compose, roles, steps
from tests.support.settings import is_variable


def arguments_of(stage: str, verb: str) -> list[str]:
    return [step.rest for step in steps() if (step.stage, step.verb) == (stage, verb)]


def test_compose_builds_the_stages() -> None:
    stages = {step.stage for step in steps()}
    built = [service["build"] for service in compose()["services"].values() if "build" in service]
    assert {build["target"] for build in built} == stages == {"attune", "engine"}
    assert {(DOCKERFILE.parent / build["context"]).resolve() for build in built} == {REPOSITORY}
    assert {REPOSITORY / build["dockerfile"] for build in built} == {DOCKERFILE}
    images = {service["image"] for service in compose()["services"].values() if "build" in service}
    assert {service["image"] for service in roles().values()} == images, (
        "a service uses an image that no service builds"
    )


def test_base_image_is_pinned() -> None:
    [base] = [step.rest for step in steps() if step.verb == "FROM" and step.stage == "attune"]
    assert re.fullmatch(r"python:3\.11\.\d+-slim-bookworm AS attune", base)


def test_copied_files_exist_and_are_not_ignored() -> None:
    ignored = (REPOSITORY / ".dockerignore").read_text().split()
    for step in steps():
        if step.verb == "COPY":
            *sources, _ = step.rest.split()
            for source in sources:
                assert (REPOSITORY / source).exists(), f"{source} does not exist"
                assert not any(fnmatch(source, pattern) for pattern in ignored)


def test_packages_are_copied() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
    packages = {pattern.rstrip("*") for pattern in project["tool"]["setuptools"]["packages"]["find"]["include"]}
    assert packages <= {rest.split()[0] for rest in arguments_of("attune", "COPY")}
    assert arguments_of("attune", "ENTRYPOINT") == ['["attune"]'] and "attune" in project["project"]["scripts"]


def test_client_programs_of_postgres_are_installed() -> None:
    """`attune backup` runs pg_dump and pg_restore. Those of bookworm are of the major version of the server."""
    assert any("postgresql-client" in rest for rest in arguments_of("attune", "RUN"))
    assert compose()["services"]["postgres"]["image"].startswith("postgres:15.")


def test_torch_is_installed_before_the_source_is_copied() -> None:
    verbs = [(step.verb, step.rest) for step in steps() if step.stage == "attune"]
    torch = next(n for n, (verb, rest) in enumerate(verbs) if verb == "RUN" and "torch.txt" in rest)
    copies = [n for n, (verb, rest) in enumerate(verbs) if verb == "COPY" and not rest.startswith("requirements/")]
    assert torch < min(copies)


@pytest.mark.parametrize("stage", ["attune", "engine"])
def test_images_do_not_run_as_root(stage: str) -> None:
    assert arguments_of(stage, "USER")[-1] == "10001"


def test_volumes_are_writable_by_the_user() -> None:
    commands = " ".join(arguments_of("attune", "RUN"))
    mounted = {volume.partition(":")[2] for volume in roles()["api"]["volumes"]}
    assert mounted == {"/data", "/home/attune/.cache/huggingface"}
    assert f"mkdir -p {' '.join(sorted(mounted))}" in commands and "chown -R attune:attune /data" in commands


def test_environment_variables_are_settings() -> None:
    names = {name for rest in arguments_of("attune", "ENV") for name in re.findall(r"(ATTUNE_\w+)=", rest)}
    assert names == {"ATTUNE_HOME"} and is_variable("ATTUNE_HOME")


def test_packages_are_installed_with_hashes() -> None:
    installs = [part for step in steps() for part in step.rest.split("&&") if "pip install" in part and " -r " in part]
    for install in installs:
        assert "--require-hashes" in install or install.strip().endswith("-r requirements/torch.txt"), install
    assert len(installs) == 4


def test_hadolint_reports_nothing() -> None:
    hadolint = Path(sys.executable).with_name("hadolint")
    result = subprocess.run([hadolint, str(DOCKERFILE)], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout
