"""The command line of those who look after learning: train, rewards, subject, audit."""

import json
from pathlib import Path

from app.models import Turn
from tests.app.cli.test_commands import at, run
from tests.support.deployment import Harness
from tests.support.trained_versions import trained

from app.cli.main import app  # isort: skip

__all__ = ["at"]


async def test_learning_is_paused_seen_and_resumed(at: Harness) -> None:
    assert "shop: asynchronous, 0 alarms" in run(app, ["train", "status"]).output
    assert "shop: halted (a bad day)" in run(app, ["train", "pause", "--reason", "a bad day"]).output
    refused = run(app, ["train", "trigger"])
    assert refused.exit_code == 1 and "halted; resume it first" in refused.output
    assert json.loads(run(app, ["train", "resume", "--json"]).stdout)["mode"] == "asynchronous"
    assert json.loads(run(app, ["train", "trigger", "--json"]).stdout)["triggered"] is True
    told = run(app, ["audit", "--action", "learning halted"]).output
    assert "learning halted shop a bad day" in told and "resume" not in told


async def test_rewards_are_shown_changed_in_a_file_and_set(at: Harness, tmp_path: Path) -> None:
    file = tmp_path / "rewards.json"
    config = json.loads(run(app, ["rewards", "show"]).stdout)
    config["sources"].append({"type": "rule", "name": "tools", "function": "tool_outcome"})
    file.write_text(json.dumps(config))
    assert "its own rewards: explicit, tools" in run(app, ["rewards", "set", str(file)]).output
    assert json.loads(run(app, ["rewards", "show"]).stdout)["sources"][1]["name"] == "tools"
    file.write_text(json.dumps({"sources": []}))
    assert "at least one source" in run(app, ["rewards", "set", str(file)]).output
    file.write_text("{")
    assert "is no JSON" in run(app, ["rewards", "set", str(file)]).output
    assert "the deployment's rewards: explicit" in run(app, ["rewards", "reset"]).output


async def test_a_subject_is_shown_taken_away_and_erased(at: Harness, tmp_path: Path) -> None:
    await at.version()
    turn = await at.turn(end_user="team/ada")
    await trained(at, turn)
    assert "1 turns" in run(app, ["subject", "show", "team/ada"]).output
    out = tmp_path / "ada.ndjson"
    assert "2 lines" in run(app, ["subject", "export", "team/ada", "--out", str(out)]).output
    assert json.loads(out.read_text().splitlines()[0])["id"] == turn.id
    assert json.loads(run(app, ["subject", "export", "team/ada"]).stdout.splitlines()[0])["id"] == turn.id
    declined = run(app, ["subject", "erase", "team/ada"], input="n\n")
    assert declined.exit_code == 1 and "Erase 1 turns" in declined.output
    assert (await at.get(Turn, turn.id)).deleted_at is None
    told = run(app, ["subject", "erase", "team/ada", "--yes"]).output
    assert "erased: 1 turns" in told and "shop@v2" in told and "has learned from it, itself" in told
    assert (await at.get(Turn, turn.id)).deleted_at is not None
    gone = run(app, ["subject", "show", "team/ada"])
    assert gone.exit_code == 1 and "Nothing is on record" in gone.output
