"""Command rollouts."""

import json
from pathlib import Path

from app.cli.main import app
from tests.support.cli import run
from tests.support.deployment import Harness
from tests.support.rollout_rows import create_prompt_set


async def test_settings_are_shown_set_from_a_file_and_reset(cli_harness: Harness, tmp_path: Path) -> None:
    assert "no group samples: extra_replies is 0" in run(app, ["rollouts", "show"]).output
    file = tmp_path / "rollouts.json"
    file.write_text(json.dumps({"group_sampling": {"extra_replies": 3}}))
    assert '"extra_replies": 3' in run(app, ["rollouts", "set", str(file)]).output
    assert json.loads(run(app, ["rollouts", "show", "--json"]).stdout)["overridden"] is True
    file.write_text(json.dumps({"group_sampling": {"extra_replies": 99}}))
    assert "less than or equal to 15" in run(app, ["rollouts", "set", str(file)]).output
    file.write_text("{")
    assert "is not valid JSON" in run(app, ["rollouts", "set", str(file)]).output
    assert "the deployment's settings" in run(app, ["rollouts", "reset"]).output


async def test_plan_is_created_listed_paused_and_cancelled(cli_harness: Harness) -> None:
    await create_prompt_set(cli_harness, ("2 + 2?", "4"))
    output = json.loads(run(app, ["rollouts", "plan", "sums", "--verifier", "number", "--n", "2", "--json"]).stdout)
    assert (output["n"], output["verifier"]["type"], output["state"]) == (2, "number", "running")
    assert "sums, running, pass 1 of 1, prompt 0 of 1" in run(app, ["rollouts", "plans"]).output
    assert "paused (lunch)" in run(app, ["rollouts", "pause", output["id"], "--reason", "lunch"]).output
    assert "running" in run(app, ["rollouts", "resume", output["id"]]).output
    assert "cancelled" in run(app, ["rollouts", "cancel", output["id"]]).output
    assert "is cancelled; it cannot resume" in run(app, ["rollouts", "resume", output["id"]]).output
    as_json = '{"type": "regex", "pattern": "4"}'
    assert json.loads(run(app, ["rollouts", "plan", "sums", "--verifier", as_json, "--json"]).stdout)["n"] == 8
    assert "known verifiers are none" in run(app, ["rollouts", "plan", "sums", "--verifier", "mine"]).output
    assert "rollouts: none" in run(app, ["status"]).output
