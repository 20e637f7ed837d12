"""Commands rewards and rewards models."""

import json
from pathlib import Path

from app.cli.main import app
from app.models import RewardModelState
from tests.support.cli import run
from tests.support.deployment import Harness
from tests.support.human_feedback import create_reward_model

METRICS = {"agreement": 0.81, "calibration_error": 0.04}


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


async def test_fit_is_requested(cli_harness: Harness) -> None:
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
