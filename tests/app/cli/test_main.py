"""Commands with and without a running service."""

import asyncio
import json
from pathlib import Path

import pytest

from app.cli.main import app
from app.cli.server import check_ports_are_free, prepare_database
from app.core.settings import Settings, get_settings
from tests.support.cli import run
from tests.support.deployment import Harness
from tests.support.engine_fixture import free_port
from tests.support.trained_versions import publish


async def test_versions_status_and_rollback(cli_harness: Harness) -> None:
    await publish(cli_harness)
    rows = json.loads(run(app, ["versions", "--json"]).stdout)
    assert [(row["name"], row["serving"]) for row in rows] == [("shop@v0", False), ("shop@v1", True)]
    assert run(app, ["rollback", "--reason", "rude"]).stdout.strip() == "shop@v1 → shop@v0"
    assert "shop@v1" in run(app, ["versions"]).stdout
    output = run(app, ["status"]).stdout
    assert "shop serves shop@v0" in output and "deployment.rolled_back shop@v0 rude" in output
    assert run(app, ["rollback", "--to", "v0"]).stdout.strip() == "shop@v0 → shop@v0", "as deploy takes it; idempotent"
    assert run(app, ["rollback", "--to", "latest"]).exit_code == 2
    refused = run(app, ["rollback"])
    assert refused.exit_code == 1 and "is the first version; there is none to roll back to" in refused.output


async def test_chat_sends_the_rating_of_a_reply(cli_harness: Harness, scripted: object) -> None:
    from app.models import Feedback

    answer = run(app, ["chat"], input="When are you open?\nu\n\n")
    assert "We are open from nine to six." in answer.output
    assert "[u]p, [d]own" in answer.output
    assert [row.value for row in await cli_harness.all(Feedback)] == [1.0]


async def test_chat_continues_after_a_failed_reply(cli_harness: Harness) -> None:
    answer = run(app, ["chat"], input="Hello?\n\n")
    assert answer.exit_code == 0 and "cannot be reached" in answer.output


async def test_created_key_has_only_its_scopes(cli_harness: Harness) -> None:
    result = await asyncio.to_thread(run, app, ["keys", "create", "--scope", "feedback"])
    key = result.stdout.strip()
    answer = await cli_harness.api.get("/v1/policies", headers={"authorization": f"Bearer {key}"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "missing_scope")
    turn = await cli_harness.turn()
    assert (await cli_harness.vote(turn.id)).status_code == 201


@pytest.mark.parametrize("command", [["status"], ["versions"], ["rollback"], ["chat"]])
def test_commands_without_a_service_explain_the_error(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ATTUNE_HOME", str(tmp_path))
    monkeypatch.setenv("ATTUNE_PORT", str(free_port()))
    get_settings.cache_clear()
    without_key = run(app, command, input="hi\n\n")
    assert "set ATTUNE_API_KEY" in without_key.output
    monkeypatch.setenv("ATTUNE_API_KEY", "sk-attune-x")
    get_settings.cache_clear()
    assert "no connection to" in run(app, command, input="hi\n\n").output
    get_settings.cache_clear()


def test_api_key_is_printed_at_the_first_start_only(tmp_path: Path) -> None:
    settings = Settings(home=tmp_path / "home")
    lines: list[str] = []
    prepare_database(settings, lines.append)
    assert len(lines) == 1 and "sk-attune-" in lines[0]
    assert settings.credentials_file.stat().st_mode & 0o777 == 0o600
    prepare_database(settings, lines.append)
    assert len(lines) == 1


def test_different_base_model_is_refused(tmp_path: Path) -> None:
    prepare_database(Settings(home=tmp_path / "home"), lambda line: None)
    with pytest.raises(ValueError, match=r"learns on .* not on other/model"):
        prepare_database(Settings(home=tmp_path / "home", model="other/model"), lambda line: None)


def test_taken_port_is_refused(harness: Harness, live_url: str) -> None:
    port = int(live_url.rpartition(":")[2])
    with pytest.raises(ValueError, match="is taken"):
        check_ports_are_free(Settings(port=port, engine_port=free_port()))
