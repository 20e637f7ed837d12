"""Commands feedback and train votes, and the votes in status."""

import json

from app.cli.main import app
from tests.support.cli import run
from tests.support.deployment import Harness


async def test_the_outcome_of_a_vote_is_shown(cli_harness: Harness) -> None:
    turn = await cli_harness.turn()
    feedback_id = (await cli_harness.vote(turn.id, source={"id": "ada"})).json()["id"]
    output = run(app, ["feedback", "show", feedback_id]).output
    assert f"{feedback_id}: binary up on {turn.id} by HUMAN/ada" in output
    assert "waiting (processing): It has not been processed yet." in output
    assert json.loads(run(app, ["feedback", "show", feedback_id, "--json"]).stdout)["outcome"]["state"] == "waiting"
    unknown = run(app, ["feedback", "show", "fb-0"])
    assert unknown.exit_code == 1 and "There is no feedback" in unknown.output


async def test_votes_are_counted(cli_harness: Harness) -> None:
    turn = await cli_harness.turn()
    await cli_harness.vote(turn.id)
    await cli_harness.vote(turn.id, "down")
    line = "2 votes: 0 learned from, 1 waiting, 1 not learned from"
    output = run(app, ["train", "votes"]).output
    assert f"shop: {line}" in output and "replaced" in output and "processing" in output
    assert f"of people: {line}" in output
    assert line in run(app, ["status"]).output
    assert json.loads(run(app, ["train", "votes", "--json"]).stdout)["total"] == 2
    assert json.loads(run(app, ["status", "--json"]).stdout)["policies"][0]["votes"]["total"] == 2
