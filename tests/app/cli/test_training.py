"""Commands train and audit."""

import json

from app.cli.main import app
from tests.support.cli import run
from tests.support.deployment import Harness


async def test_training_is_paused_shown_and_resumed(cli_harness: Harness) -> None:
    assert "shop: asynchronous, 0 alarms" in run(app, ["train", "status"]).output
    assert "shop: halted (a bad day)" in run(app, ["train", "pause", "--reason", "a bad day"]).output
    refused = run(app, ["train", "trigger"])
    assert refused.exit_code == 1 and "halted; resume it first" in refused.output
    assert json.loads(run(app, ["train", "resume", "--json"]).stdout)["mode"] == "asynchronous"
    assert json.loads(run(app, ["train", "trigger", "--json"]).stdout)["triggered"] is True
    output = run(app, ["audit", "--action", "training.halted"]).output
    assert "training.halted shop a bad day" in output and "resume" not in output
