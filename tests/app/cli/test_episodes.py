"""Commands episodes list and show."""

import json

from app.cli.main import app
from tests.support import episodes
from tests.support.cli import run
from tests.support.deployment import Harness


async def test_episodes_are_listed_and_shown(cli_harness: Harness) -> None:
    one, other = [await episodes.create(cli_harness, task=task) for task in ("refund", "greeting")]
    for step, agent in enumerate(("planner", "worker"), 1):
        await cli_harness.turn(episode_id=one["id"], episode_step=step, agent=agent)
    await episodes.end(cli_harness, one["id"], outcome=0.5)
    listed = run(app, ["episodes", "list"]).output
    assert one["id"] in listed and other["id"] in listed and "completed" in listed and "0.5" in listed
    assert [row["id"] for row in json.loads(run(app, ["episodes", "list", "--state", "open", "--json"]).stdout)] == [
        other["id"]
    ]
    shown = run(app, ["episodes", "show", one["id"]]).output
    assert "ended (completed)" in shown and "task refund, outcome 0.5, 2 chats with 4 tokens" in shown
    turns = json.loads(run(app, ["episodes", "show", one["id"], "--json"]).stdout)["turns"]
    assert [turn["agent"] for turn in turns] == ["planner", "worker"]
    assert "open" in run(app, ["episodes", "show", other["id"]]).output
    unknown = run(app, ["episodes", "show", "ep-0"])
    assert unknown.exit_code == 1 and "There is no episode" in unknown.output
