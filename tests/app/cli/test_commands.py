"""The command line against a service that runs, and against none."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from app.cli.main import app
from app.cli.up import prepare, refuse_taken_ports
from app.core.settings import Settings, get_settings
from tests.app.deployments.test_rollback import publish
from tests.support.deployment import Harness
from tests.support.engine_fixture import free_port

run = CliRunner().invoke


@pytest.fixture
def at(harness: Harness, served: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Harness]:
    """The shell of somebody who has exported where the service is and a key."""
    host, _, port = served.removeprefix("http://").partition(":")
    for name, value in {"HOST": host, "PORT": port, "API_KEY": harness.key, "POLICY": "shop"}.items():
        monkeypatch.setenv(f"ATTUNE_{name}", value)
    monkeypatch.setenv("ATTUNE_DATABASE_URL", harness.settings.database)
    monkeypatch.setenv("ATTUNE_HOME", str(harness.settings.home))
    get_settings.cache_clear()
    yield harness
    get_settings.cache_clear()


async def test_versions_status_and_rollback(at: Harness) -> None:
    await publish(at)
    rows = json.loads(run(app, ["versions", "--json"]).stdout)
    assert [(row["name"], row["serving"]) for row in rows] == [("shop@v0", False), ("shop@v1", True)]
    assert run(app, ["rollback", "--reason", "rude"]).stdout.strip() == "shop@v1 → shop@v0"
    assert "shop@v1" in run(app, ["versions"]).stdout
    told = run(app, ["status"]).stdout
    assert "shop serves shop@v0" in told and "rollback shop@v0 rude" in told
    assert run(app, ["rollback", "--to", "v0"]).stdout.strip() == "shop@v0 → shop@v0", "as deploy takes it; idempotent"
    assert run(app, ["rollback", "--to", "latest"]).exit_code == 2
    again = run(app, ["rollback"])
    assert again.exit_code == 1 and "nothing to go back to" in again.output


async def test_a_chat_in_a_terminal_asks_for_a_thumb_and_sends_it(at: Harness, scripted: object) -> None:
    from app.models import Feedback

    answer = run(app, ["chat"], input="When are you open?\nu\n\n")
    assert "We are open from nine to six." in answer.output
    assert "[u]p, [d]own" in answer.output
    assert [row.value for row in await at.all(Feedback)] == [1.0]


async def test_a_chat_goes_on_after_a_reply_that_did_not_come(at: Harness) -> None:
    answer = run(app, ["chat"], input="Hello?\n\n")
    assert answer.exit_code == 0 and "does not answer" in answer.output


async def test_a_new_key_works_and_has_only_its_scopes(at: Harness) -> None:
    made = await asyncio.to_thread(run, app, ["keys", "create", "--scope", "feedback"])
    key = made.stdout.strip()
    answer = await at.api.get("/v1/policies", headers={"authorization": f"Bearer {key}"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "missing_scope")
    turn = await at.turn()
    assert (await at.thumb(turn.id)).status_code == 201


@pytest.mark.parametrize("command", [["status"], ["versions"], ["rollback"], ["chat"]])
def test_without_a_service_there_is_a_sentence(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ATTUNE_HOME", str(tmp_path))
    monkeypatch.setenv("ATTUNE_PORT", str(free_port()))
    get_settings.cache_clear()
    without_key = run(app, command, input="hi\n\n")
    assert "set ATTUNE_API_KEY" in without_key.output
    monkeypatch.setenv("ATTUNE_API_KEY", "sk-attune-x")
    get_settings.cache_clear()
    assert "nothing answers at" in run(app, command, input="hi\n\n").output
    get_settings.cache_clear()


def test_the_key_is_shown_at_the_first_start_only(tmp_path: Path) -> None:
    settings, said = Settings(home=tmp_path / "home"), []
    prepare(settings, said.append)
    assert len(said) == 1 and "sk-attune-" in said[0]
    assert settings.credentials_file.stat().st_mode & 0o777 == 0o600
    prepare(settings, said.append)
    assert len(said) == 1


def test_another_base_model_is_refused_with_a_sentence(tmp_path: Path) -> None:
    prepare(Settings(home=tmp_path / "home"), lambda line: None)
    with pytest.raises(ValueError, match=r"learns on .* not on other/model"):
        prepare(Settings(home=tmp_path / "home", model="other/model"), lambda line: None)


def test_a_taken_port_is_refused_with_a_sentence(harness: Harness, served: str) -> None:
    port = int(served.rpartition(":")[2])
    with pytest.raises(ValueError, match="is taken"):
        refuse_taken_ports(Settings(port=port, engine_port=free_port()))
