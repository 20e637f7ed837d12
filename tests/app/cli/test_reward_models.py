"""attune rewards models: seen and steered from the command line."""

import json

from app.models import RewardModelState
from tests.app.cli.test_commands import at, run
from tests.support.deployment import Harness
from tests.support.human_feedback import model

from app.cli.main import app  # isort: skip

__all__ = ["at"]
METRICS = {"agreement": 0.81, "calibration_error": 0.04}


async def test_reward_models_are_listed_fitted_served_and_silenced(at: Harness) -> None:
    assert "shop has no reward model yet" in run(app, ["rewards", "models", "list"]).output
    refused = run(app, ["rewards", "models", "fit"])
    assert refused.exit_code == 1 and "listens to no reward model" in refused.output
    counts = {"num_thumbs": 812, "num_pairs": 40, "num_raters": 31}
    await model(at, RewardModelState.TRAINED, metrics=METRICS, **counts)
    line = "shop/rm-1: serving, 812 thumbs and 40 pairs of 31 people, agreement 81%, calibration error 0.04 (good)"
    assert line in run(app, ["rewards", "models", "serve", "1", "--reason", "good"]).output
    assert "reward model: shop/rm-1" in run(app, ["status"]).output
    assert json.loads(run(app, ["rewards", "models", "list", "--json"]).stdout)["serving"] == "shop/rm-1"
    assert "shop/rm-1: disabled" in run(app, ["rewards", "models", "disable", "1"]).output
    assert "reward model: none serves; shop/rm-1 is disabled" in run(app, ["status"]).output


async def test_a_fit_is_asked_for(at: Harness) -> None:
    sources = [{"type": "explicit", "name": "explicit"}, {"type": "learned", "name": "learned"}]
    assert (await at.api.put("/v1/policies/shop/rewards", json={"sources": sources})).status_code == 200
    assert "shop/rm-1: open (to see)" in run(app, ["rewards", "models", "fit", "--reason", "to see"]).output
    again = run(app, ["rewards", "models", "fit"])
    assert again.exit_code == 1 and "shop/rm-1 is being fitted" in again.output
