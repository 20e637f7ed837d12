"""compose.yaml, as far as it can be tested without a container engine."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from shutil import which
from typing import Any

import compose_spec
import pytest
from typer.testing import CliRunner

from app.cli.main import app
from app.cli.server import build_processes
from app.core.settings import Settings
from app.core.settings.loading import load_settings
from tests.conftest import skip_or_fail
from tests.docker.files import COMPOSE, FOLDER, OVERLAY, compose, roles
from tests.journeys.brokers import OwnRedis
from tests.support.engine_fixture import RunningEngine, free_port
from tests.support.settings import is_variable

SECRET = re.compile(r"PASSWORD|KEY|AUTH|SECRET|TOKEN")
VARIABLE = re.compile(r"\$\{(\w+)([^}]*)\}")


def services() -> dict[str, dict[str, Any]]:
    content: dict[str, dict[str, Any]] = compose()["services"]
    return content


@pytest.mark.parametrize("file", [COMPOSE, OVERLAY], ids=lambda path: path.name)
def test_files_conform_to_the_compose_specification(file: Path) -> None:
    compose_spec.PyCompose.from_json(VARIABLE.sub("8700", json.dumps(compose(file)))).validate()


def test_each_process_of_attune_up_has_a_service() -> None:
    assert {child.name for child in build_processes(Settings())} < set(services())
    assert set(services()) == {child.name for child in build_processes(Settings())} | {"postgres", "redis", "setup"}


@pytest.mark.parametrize("name", sorted(roles()))
def test_commands_exist(name: str) -> None:
    command = [VARIABLE.sub("1", argument) for argument in roles()[name]["command"]]
    result = CliRunner().invoke(app, [*command, "--help"])
    assert result.exit_code == 0 and "Usage" in result.output, result.output
    assert CliRunner().invoke(app, [*command, "--no-such-option", "--help"]).exit_code != 0, (
        "an unknown option is an error"
    )


@pytest.mark.parametrize("file", [COMPOSE, OVERLAY], ids=lambda path: path.name)
def test_attune_variables_are_settings(file: Path) -> None:
    names = {name for service in compose(file)["services"].values() for name in service.get("environment", {})}
    ours = {name for name in names if name.startswith("ATTUNE_")}
    assert ours and all(map(is_variable, ours))


def test_variables_make_valid_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in roles():
        for variable, value in roles()[name]["environment"].items():
            monkeypatch.setenv(variable, VARIABLE.sub("secret", value))
        settings = load_settings().settings
        assert settings.database_url == "postgresql+psycopg://attune_service:secret@postgres/attune"
        assert settings.limits.url == "async+redis://:secret@redis:6379/1"


def test_secrets_have_no_default_and_no_literal_value() -> None:
    variables = VARIABLE.findall(COMPOSE.read_text() + OVERLAY.read_text())
    secrets = {name: rest for name, rest in variables if SECRET.search(name)}
    assert secrets.keys() == {
        "POSTGRES_PASSWORD",
        "POSTGRES_SERVICE_PASSWORD",
        "REDIS_PASSWORD",
        "ATTUNE_ENGINE__API_KEY",
        "ATTUNE_ENGINE__ADMIN_KEY",
    }
    assert all(rest == f":?set {name}" for name, rest in variables if SECRET.search(name))
    for service in services().values():
        for name, value in service.get("environment", {}).items():
            assert not SECRET.search(name) or VARIABLE.fullmatch(value), f"{name} has a literal value"
    example = (FOLDER / "attune.env.example").read_text()
    assert all(f"\n{name}=\n" in example for name in secrets)


def test_dependencies_exist_and_can_be_waited_for() -> None:
    for service in services().values():
        for name, condition in service.get("depends_on", {}).items():
            dependency = services()[name]
            if condition["condition"] == "service_healthy":
                assert "healthcheck" in dependency
            else:
                assert condition["condition"] == "service_completed_successfully"
                assert dependency["restart"] == "on-failure", "a service that always restarts never completes"


def test_networks_and_volumes_are_declared_and_used() -> None:
    content = compose()
    networks = {name for service in services().values() for name in service["networks"]}
    volumes = {volume.partition(":")[0] for service in services().values() for volume in service.get("volumes", [])}
    assert networks == set(content["networks"]) and volumes == set(content["volumes"])
    assert all(service["networks"] == ["back"] for name, service in services().items() if name in ("postgres", "redis"))
    assert content["networks"]["back"] == {"internal": True}


def test_ports_are_local_and_services_restart() -> None:
    ports = {name: service["ports"] for name, service in services().items() if "ports" in service}
    assert set(ports) == {"api"} and all(port.startswith("127.0.0.1:") for port in ports["api"])
    assert {service["restart"] for name, service in services().items() if name != "setup"} == {"unless-stopped"}


def test_images_are_pinned() -> None:
    for service in services().values():
        tag = service["image"].partition(":")[2]
        assert re.match(r"\d+\.\d+", tag), f"{service['image']} is not pinned"


def test_gpu_overlay_changes_existing_services() -> None:
    overlay = compose(OVERLAY)["services"]
    assert overlay.keys() <= services().keys()
    assert {name for name, service in overlay.items() if "deploy" in service} == {"engine", "trainer"}
    with_dtype = {name for name, service in overlay.items() if "ATTUNE_DTYPE" in service.get("environment", {})}
    own = {name for name, service in services().items() if service["image"].startswith("attune")}
    assert with_dtype == own, "training, serving and verification need the same dtype; a worker verifies, too"


def health_check(service: str) -> list[str]:
    """Return the command of the service's health check, with this interpreter or this shell."""
    kind, *arguments = services()[service]["healthcheck"]["test"]
    if kind == "CMD-SHELL":
        return ["sh", "-c", arguments[0]]
    return [sys.executable if argument == "python" else argument for argument in arguments]


def is_healthy(command: list[str], replace: tuple[str, str] = ("", ""), **environment: str) -> bool:
    arguments = [part.replace(*replace) if replace[0] else part for part in command]
    result = subprocess.run(arguments, env={**os.environ, **environment}, capture_output=True, timeout=120)
    return result.returncode == 0


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_health_check_of_the_api(live_url: str) -> None:
    assert is_healthy(health_check("api"), ("http://127.0.0.1:8700", live_url))
    assert not is_healthy(health_check("api"), ("127.0.0.1:8700", f"127.0.0.1:{free_port()}"))


def test_health_check_of_redis_needs_the_password(tmp_path: Path) -> None:
    if which("redis-cli") is None:
        skip_or_fail("redis-cli is not installed")
    options = [VARIABLE.sub("right", argument) for argument in services()["redis"]["command"]][1:]
    server = OwnRedis(tmp_path, options=tuple(options), password="right")
    server.start()
    try:
        replacement = ("redis-cli", f"redis-cli -p {server.port}")
        assert is_healthy(health_check("redis"), replacement, REDISCLI_AUTH="right")
        assert not is_healthy(health_check("redis"), replacement, REDISCLI_AUTH="wrong")
    finally:
        server.kill()
    assert not is_healthy(health_check("redis"), replacement, REDISCLI_AUTH="right")


@pytest.mark.postgres
def test_health_check_of_postgres(postgres: str) -> None:
    if which("pg_isready") is None:
        skip_or_fail("pg_isready is not installed")
    host, _, port = postgres.partition("@")[2].partition("/")[0].partition(":")
    assert is_healthy(health_check("postgres"), PGHOST=host, PGPORT=port or "5432")
    assert not is_healthy(health_check("postgres"), PGHOST="127.0.0.1", PGPORT=str(free_port()))


@pytest.mark.engine
def test_health_check_of_the_engine_needs_no_key(engine: RunningEngine) -> None:
    assert is_healthy(health_check("engine"), ("http://engine:8710", engine.spec.url))
