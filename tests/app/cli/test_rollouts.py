"""The command line of those who have the learner ask for itself: rollouts."""

import json
from pathlib import Path

from tests.app.cli.test_commands import at, run
from tests.support.deployment import Harness
from tests.support.rollout_rows import prompts

from app.cli.main import app  # isort: skip

__all__ = ["at"]


async def test_settings_are_shown_set_from_a_file_and_reset(at: Harness, tmp_path: Path) -> None:
    assert "no group samples: extra_replies is 0" in run(app, ["rollouts", "show"]).output
    file = tmp_path / "rollouts.json"
    file.write_text(json.dumps({"group_sampling": {"extra_replies": 3}}))
    assert '"extra_replies": 3' in run(app, ["rollouts", "set", str(file)]).output
    assert json.loads(run(app, ["rollouts", "show", "--json"]).stdout)["own"] is True
    file.write_text(json.dumps({"group_sampling": {"extra_replies": 99}}))
    assert "less than or equal to 15" in run(app, ["rollouts", "set", str(file)]).output
    file.write_text("{")
    assert "is no JSON" in run(app, ["rollouts", "set", str(file)]).output
    assert "the deployment's settings" in run(app, ["rollouts", "reset"]).output


async def test_a_plan_is_made_seen_paused_and_cancelled(at: Harness) -> None:
    await prompts(at, ("2 + 2?", "4"))
    told = json.loads(run(app, ["rollouts", "plan", "sums", "--verifier", "number", "--n", "2", "--json"]).stdout)
    assert (told["n"], told["verifier"]["type"], told["state"]) == (2, "number", "running")
    assert "sums, running, pass 1 of 1, prompt 0 of 1" in run(app, ["rollouts", "plans"]).output
    assert "paused (lunch)" in run(app, ["rollouts", "pause", told["id"], "--reason", "lunch"]).output
    assert "running" in run(app, ["rollouts", "resume", told["id"]]).output
    assert "cancelled" in run(app, ["rollouts", "cancel", told["id"]]).output
    assert "nothing to resume" in run(app, ["rollouts", "resume", told["id"]]).output
    as_json = '{"type": "regex", "pattern": "4"}'
    assert json.loads(run(app, ["rollouts", "plan", "sums", "--verifier", as_json, "--json"]).stdout)["n"] == 8
    assert "known verifiers are none" in run(app, ["rollouts", "plan", "sums", "--verifier", "mine"]).output
    assert "rollouts: none" in run(app, ["status"]).output
