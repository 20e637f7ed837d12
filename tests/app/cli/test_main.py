"""Commands with and without a running service."""

import asyncio
import json
import sys
from pathlib import Path

import pytest

from app.cli.main import app
from app.cli.server import prepare_database
from app.core.settings import REPOSITORY, Settings, get_settings
from app.ops.start_checks import check_ports_are_free
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


async def test_one_message_is_answered(cli_harness: Harness, scripted: object) -> None:
    answer = run(app, ["chat", "--message", "When are you open?"])
    assert answer.exit_code == 0 and answer.stdout == "We are open from nine to six.\n"
    completion_id = answer.stderr.partition(" ")[0]
    assert f"{completion_id} · shop@v0" in answer.stderr
    assert run(app, ["feedback", "give", completion_id, "up"]).exit_code == 0
    body = json.loads(run(app, ["chat", "-m", "-", "--json"], input="When?\n").stdout)
    assert body["reply"] == "We are open from nine to six." and body["completion_id"].startswith("chatcmpl-")


async def test_trigger_says_what_it_triggered(cli_harness: Harness) -> None:
    output = run(app, ["train", "trigger"]).output
    assert "shop: triggered with 0 ready samples, two are enough. Next batch: 2 more ready samples." in output
    run(app, ["train", "pause"])
    refused = run(app, ["train", "trigger"])
    assert refused.exit_code == 1 and "halted; resume it first" in refused.output


def test_version_is_printed() -> None:
    result = run(app, ["--version"])
    assert result.exit_code == 0
    name, number, _, revision = result.stdout.split()
    assert name.startswith("attune") and number.rstrip(",")[0].isdigit()
    assert list(REPOSITORY.glob(f"migrations/versions/{revision}*.py"))


def test_shells_complete_commands() -> None:
    environment = {"_ATTUNE_COMPLETE": "complete_bash", "COMP_WORDS": "attune do", "COMP_CWORD": "1"}
    assert run(app, [], env=environment, prog_name="attune").stdout.split() == ["doctor"]


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
    monkeypatch.setenv("ATTUNE_SERVER__PORT", str(free_port()))
    get_settings.cache_clear()
    without_key = run(app, command, input="hi\n\n")
    assert f"there is no {tmp_path}/credentials.json; set ATTUNE_API_KEY" in without_key.output
    monkeypatch.setenv("ATTUNE_API_KEY", "sk-attune-x")
    get_settings.cache_clear()
    assert "no connection to" in run(app, command, input="hi\n\n").output
    get_settings.cache_clear()


@pytest.mark.parametrize("is_terminal", [True, False])
def test_api_key_is_printed_at_the_first_start_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_terminal: bool
) -> None:
    """Without a terminal the output may go to a log that many people read: the file that holds the key is named."""
    monkeypatch.setattr(sys.stdout, "isatty", lambda: is_terminal)
    settings = Settings(home=tmp_path / "home")
    lines: list[str] = []
    prepare_database(settings, lines.append)
    assert len(lines) == 1 and ("sk-attune-" in lines[0]) == is_terminal
    assert (str(settings.credentials_file) in lines[0]) != is_terminal
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
        check_ports_are_free(Settings(server={"port": port}, engine={"port": free_port()}))
