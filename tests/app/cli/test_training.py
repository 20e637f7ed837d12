"""Commands train, rewards and rollouts, and audit."""

import json
from pathlib import Path

from app.cli.main import app
from app.models import RewardModelState
from tests.support.cli import run
from tests.support.deployment import Harness
from tests.support.human_feedback import create_reward_model
from tests.support.rollout_rows import create_prompt_set

METRICS = {"agreement": 0.81, "calibration_error": 0.04}


async def test_training_is_paused_shown_and_resumed(cli_harness: Harness) -> None:
    assert "shop: asynchronous, 0 alarms" in run(app, ["train", "status"]).output
    assert "shop: halted (a bad day)" in run(app, ["train", "pause", "--reason", "a bad day"]).output
    refused = run(app, ["train", "trigger"])
    assert refused.exit_code == 1 and "halted; resume it first" in refused.output
    assert json.loads(run(app, ["train", "resume", "--json"]).stdout)["mode"] == "asynchronous"
    assert json.loads(run(app, ["train", "trigger", "--json"]).stdout)["triggered"] is True
    output = run(app, ["audit", "--action", "training.halted"]).output
    assert "training.halted shop a bad day" in output and "resume" not in output


async def test_reward_models_are_listed_fitted_served_and_disabled(cli_harness: Harness) -> None:
    assert "shop has no reward model yet" in run(app, ["rewards", "models", "list"]).output
    refused = run(app, ["rewards", "models", "fit"])
    assert refused.exit_code == 1 and "uses no reward model" in refused.output
    counts = {"num_thumbs": 812, "num_pairs": 40, "num_raters": 31}
    await create_reward_model(cli_harness, RewardModelState.TRAINED, metrics=METRICS, **counts)
    line = (
        "shop/rm-1: serving, 812 binary labels and 40 pairs of 31 people, agreement 81%, calibration error 0.04 (good)"
    )
    assert line in run(app, ["rewards", "models", "serve", "1", "--reason", "good"]).output
    assert "reward model: shop/rm-1" in run(app, ["status"]).output
    assert json.loads(run(app, ["rewards", "models", "list", "--json"]).stdout)["serving"] == "shop/rm-1"
    assert "shop/rm-1: disabled" in run(app, ["rewards", "models", "disable", "1"]).output
    assert "reward model: none serves; shop/rm-1 is disabled" in run(app, ["status"]).output


async def test_reward_model_fit_is_requested(cli_harness: Harness) -> None:
    sources = [{"type": "explicit", "name": "explicit"}, {"type": "learned", "name": "learned"}]
    assert (await cli_harness.api.put("/v1/policies/shop/rewards", json={"sources": sources})).status_code == 200
    assert "shop/rm-1: open (to see)" in run(app, ["rewards", "models", "fit", "--reason", "to see"]).output
    again = run(app, ["rewards", "models", "fit"])
    assert again.exit_code == 1 and "shop/rm-1 is being fitted" in again.output


async def test_rewards_are_shown_set_from_a_file_and_reset(cli_harness: Harness, tmp_path: Path) -> None:
    file = tmp_path / "rewards.json"
    config = json.loads(run(app, ["rewards", "show"]).stdout)
    config["sources"].append({"type": "rule", "name": "tools", "function": "tool_outcome"})
    file.write_text(json.dumps(config))
    assert "its own rewards: explicit, tools" in run(app, ["rewards", "set", str(file)]).output
    assert json.loads(run(app, ["rewards", "show"]).stdout)["sources"][1]["name"] == "tools"
    file.write_text(json.dumps({"sources": []}))
    assert "sources must not be empty" in run(app, ["rewards", "set", str(file)]).output
    file.write_text("{")
    assert "is not valid JSON" in run(app, ["rewards", "set", str(file)]).output
    assert "the deployment's rewards: explicit" in run(app, ["rewards", "reset"]).output


async def test_rollout_settings_are_shown_set_from_a_file_and_reset(cli_harness: Harness, tmp_path: Path) -> None:
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


async def test_rollout_plan_is_created_listed_paused_and_cancelled(cli_harness: Harness) -> None:
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
