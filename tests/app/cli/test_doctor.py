"""Command doctor: what it finds, how it says to mend it, and its exit status."""

import json
from pathlib import Path
from typing import Any

import pytest

from app.cli.main import app
from app.core.settings import get_settings
from app.models import Engine
from app.ops.diagnostics import Level, describe_skew
from tests.support.cli import run
from tests.support.deployment import Harness
from tests.support.engine_fixture import free_port
from tests.support.scripted_engine import ScriptedEngine


def find(output: str, check: str) -> list[dict[str, Any]]:
    return [row for row in json.loads(output) if row["check"] == check]


async def test_working_deployment_has_no_problem(
    cli_harness: Harness, scripted: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ATTUNE_ENGINE__PORT", str(free_port()))
    monkeypatch.setenv("ATTUNE_ENGINE__PYTHON", "/bin/sh")
    result = run(app, ["doctor", "--json"])
    rows = json.loads(result.stdout)
    assert result.exit_code == 0, result.output
    problems = [row for row in rows if row["level"] != "ok" and row["check"] != "ports"]
    assert problems == []
    assert {row["check"] for row in rows} == {
        *("ports", "api", "credentials", "disk", "keys", "database", "clock", "broker", "engine", "model")
    }
    assert "the service knows the API key" in run(app, ["doctor"]).output
    async with cli_harness.db.write() as session:
        (await session.get_one(Engine, "engine-0")).url = "http://127.0.0.1:9"
    [engine, _] = find(run(app, ["doctor", "--json"]).stdout, "engine")
    assert (
        engine["level"] == "warning" and "does not answer (ready)" in engine["found"] and "attune up" in engine["fix"]
    )
    monkeypatch.setenv("ATTUNE_API_KEY", "sk-attune-unknown")
    get_settings.cache_clear()
    [credentials] = find(run(app, ["doctor", "--json"]).stdout, "credentials")
    assert credentials["level"] == "problem" and "refuses the API key" in credentials["found"]


@pytest.mark.parametrize(
    ("check", "environment", "found", "fix"),
    [
        ("broker", {"BROKER__URL": "redis://127.0.0.1:9/0"}, "does not answer", "ATTUNE_BROKER__URL"),
        ("database", {"DATABASE__URL": "postgresql+psycopg://a:geheim@127.0.0.1:9/b"}, "cannot be reached", "password"),
        ("database", {"DATABASE__URL": "sqlite+aiosqlite:///{home}/other.db"}, "no tables yet", "attune db upgrade"),
        ("model", {"MODEL": "{home}/nothing"}, "there is no folder", "ATTUNE_MODEL"),
        ("model", {"MODEL": "{home}"}, "lacks config.json, weights, a tokenizer", "Copy"),
        ("engine", {"ENGINE__PYTHON": "{home}/python"}, "is missing", "make setup"),
        ("keys", {"ENGINE__API_KEY": "k"}, "one of the two keys", "ATTUNE_ENGINE__ADMIN_KEY"),
        ("api", {"URL": "https://127.0.0.1:9"}, "does not answer", "ATTUNE_CA_FILE"),
    ],
)
def test_problem_is_named_with_its_remedy(
    check: str,
    environment: dict[str, str],
    found: str,
    fix: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in {"HOME": "{home}", "SERVER__PORT": str(free_port()), **environment}.items():
        monkeypatch.setenv(f"ATTUNE_{name}", value.format(home=tmp_path))
    result = run(app, ["doctor", "--json"])
    assert result.exit_code == 1, result.output
    assert "geheim" not in result.output
    problems = [row for row in find(result.stdout, check) if row["level"] == "problem"]
    assert [found in row["found"] and fix in row["fix"] for row in problems] == [True], result.output


def test_new_installation_has_warnings_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTUNE_SERVER__PORT", str(free_port()))
    monkeypatch.setenv("ATTUNE_ENGINE__PYTHON", "/bin/sh")
    result = run(app, ["doctor", "--home", str(tmp_path / "new")])
    assert result.exit_code == 0, result.output
    assert (
        "no files of keys" in result.output
        and "does not exist yet" in result.output
        and "the command line has no API key" in result.output
    )
    assert "0 problems" in result.output and not (tmp_path / "new").exists()


def test_readable_key_file_is_a_problem(tmp_path: Path) -> None:
    (tmp_path / "credentials.json").write_text('{"api_key": "sk-attune-x"}')
    result = run(app, ["doctor", "--home", str(tmp_path)])
    assert result.exit_code == 1 and f"chmod 600 {tmp_path}/credentials.json" in result.output


@pytest.mark.parametrize(
    ("skew", "level"), [(0.2, Level.OK), (-0.9, Level.OK), (5.0, Level.WARNING), (-40.0, Level.PROBLEM)]
)
def test_clocks_are_compared(skew: float, level: Level) -> None:
    finding = describe_skew(skew)
    assert finding.level == level and bool(finding.fix) == (level != Level.OK)
    assert ("ahead of" if skew > 0 else "behind") in finding.found
