"""compose.yaml, as far as a machine without a container engine can tell."""

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
from app.cli.up import children
from app.core.settings import Settings
from tests.conftest import missing
from tests.docker.files import COMPOSE, FOLDER, OVERLAY, compose, roles
from tests.journeys.brokers import OwnRedis
from tests.support.engine_fixture import RunningEngine, free_port

SECRET = re.compile(r"PASSWORD|KEY|AUTH|SECRET|TOKEN")
VARIABLE = re.compile(r"\$\{(\w+)([^}]*)\}")


def services() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = compose()["services"]
    return found


@pytest.mark.parametrize("file", [COMPOSE, OVERLAY], ids=lambda path: path.name)
def test_the_compose_specification_takes_it(file: Path) -> None:
    compose_spec.PyCompose.from_json(VARIABLE.sub("8700", json.dumps(compose(file)))).validate()


def test_whatever_attune_up_starts_has_a_container() -> None:
    assert {child.name for child in children(Settings())} < set(services())
    assert set(services()) == {child.name for child in children(Settings())} | {"postgres", "redis", "setup"}


@pytest.mark.parametrize("name", sorted(roles()))
def test_every_command_is_one_that_attune_has(name: str) -> None:
    command = [VARIABLE.sub("1", word) for word in roles()[name]["command"]]
    asked = CliRunner().invoke(app, [*command, "--help"])
    assert asked.exit_code == 0 and "Usage" in asked.output, asked.output
    assert CliRunner().invoke(app, [*command, "--no-such-option", "--help"]).exit_code != 0, "a wrong one is found out"


@pytest.mark.parametrize("file", [COMPOSE, OVERLAY], ids=lambda path: path.name)
def test_every_variable_of_ours_is_a_setting(file: Path) -> None:
    told = {name for service in compose(file)["services"].values() for name in service.get("environment", {})}
    ours = {name for name in told if name.startswith("ATTUNE_")}
    assert ours and ours <= {f"ATTUNE_{name.upper()}" for name in Settings.model_fields}


def test_what_is_told_makes_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in roles():
        for variable, value in roles()[name]["environment"].items():
            monkeypatch.setenv(variable, VARIABLE.sub("secret", value))
        settings = Settings()
        assert settings.database == "postgresql+psycopg://attune:secret@postgres/attune"
        assert settings.limits_url == "async+redis://:secret@redis:6379/1"


def test_no_password_has_a_default_and_none_is_written_down() -> None:
    variables = VARIABLE.findall(COMPOSE.read_text() + OVERLAY.read_text())
    secrets = {name: rest for name, rest in variables if SECRET.search(name)}
    assert secrets.keys() == {"POSTGRES_PASSWORD", "REDIS_PASSWORD", "ATTUNE_ENGINE_API_KEY", "ATTUNE_ENGINE_ADMIN_KEY"}
    assert all(rest == f":?set {name}" for name, rest in variables if SECRET.search(name))
    for service in services().values():
        for name, value in service.get("environment", {}).items():
            assert not SECRET.search(name) or VARIABLE.fullmatch(value), f"{name} is written down"
    example = (FOLDER / "attune.env.example").read_text()
    assert all(f"\n{name}=\n" in example for name in secrets)


def test_whom_a_service_waits_for_is_there_and_can_be_waited_for() -> None:
    for service in services().values():
        for name, how in service.get("depends_on", {}).items():
            awaited = services()[name]
            if how["condition"] == "service_healthy":
                assert "healthcheck" in awaited
            else:
                assert how["condition"] == "service_completed_successfully"
                assert awaited["restart"] == "on-failure", "one that is always started again never completes"


def test_networks_and_volumes_are_declared_and_all_are_used() -> None:
    content = compose()
    networks = {name for service in services().values() for name in service["networks"]}
    volumes = {volume.partition(":")[0] for service in services().values() for volume in service.get("volumes", [])}
    assert networks == set(content["networks"]) and volumes == set(content["volumes"])
    assert all(service["networks"] == ["back"] for name, service in services().items() if name in ("postgres", "redis"))
    assert content["networks"]["back"] == {"internal": True}


def test_nothing_listens_beyond_this_machine_and_all_come_back() -> None:
    ports = {name: service["ports"] for name, service in services().items() if "ports" in service}
    assert set(ports) == {"api"} and all(port.startswith("127.0.0.1:") for port in ports["api"])
    assert {service["restart"] for name, service in services().items() if name != "setup"} == {"unless-stopped"}


def test_images_are_pinned() -> None:
    for service in services().values():
        tag = service["image"].partition(":")[2]
        assert re.match(r"\d+\.\d+", tag), f"{service['image']} may be another tomorrow"


def test_the_overlay_changes_what_is_there_and_gives_a_gpu_to_whom_computes() -> None:
    overlay = compose(OVERLAY)["services"]
    assert overlay.keys() <= services().keys()
    assert {name for name, service in overlay.items() if "deploy" in service} == {"engine", "trainer"}
    precise = {name for name, service in overlay.items() if "ATTUNE_DTYPE" in service.get("environment", {})}
    assert precise == {"engine", "trainer", "publisher"}, "who trains, serves and compares must agree on it"


def probe(service: str) -> list[str]:
    """The words of its health check, run by this interpreter or this shell."""
    kind, *words = services()[service]["healthcheck"]["test"]
    if kind == "CMD-SHELL":
        return ["sh", "-c", words[0]]
    return [sys.executable if word == "python" else word for word in words]


def healthy(command: list[str], replace: tuple[str, str] = ("", ""), **environment: str) -> bool:
    words = [word.replace(*replace) if replace[0] else word for word in command]
    done = subprocess.run(words, env={**os.environ, **environment}, capture_output=True, timeout=120)
    return done.returncode == 0


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_the_check_of_the_api_tells_one_that_answers(served: str) -> None:
    assert healthy(probe("api"), ("http://127.0.0.1:8700", served))
    assert not healthy(probe("api"), ("127.0.0.1:8700", f"127.0.0.1:{free_port()}"))


def test_the_check_of_redis_tells_one_that_takes_the_password(tmp_path: Path) -> None:
    if which("redis-cli") is None:
        missing("redis-cli is not installed")
    words = [VARIABLE.sub("right", word) for word in services()["redis"]["command"]][1:]
    server = OwnRedis(tmp_path, options=tuple(words), password="right")
    server.start()
    try:
        here = ("redis-cli", f"redis-cli -p {server.port}")
        assert healthy(probe("redis"), here, REDISCLI_AUTH="right")
        assert not healthy(probe("redis"), here, REDISCLI_AUTH="wrong")
    finally:
        server.kill()
    assert not healthy(probe("redis"), here, REDISCLI_AUTH="right")


@pytest.mark.postgres
def test_the_check_of_postgres_tells_one_that_answers(postgres: str) -> None:
    if which("pg_isready") is None:
        missing("pg_isready is not installed")
    host, _, port = postgres.partition("@")[2].partition("/")[0].partition(":")
    assert healthy(probe("postgres"), PGHOST=host, PGPORT=port or "5432")
    assert not healthy(probe("postgres"), PGHOST="127.0.0.1", PGPORT=str(free_port()))


@pytest.mark.engine
def test_the_check_of_the_engine_needs_no_key(engine: RunningEngine) -> None:
    assert healthy(probe("engine"), ("http://engine:8710", engine.spec.url))
