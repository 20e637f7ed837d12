"""Commands feedback and train votes, and the votes in status."""

import json
from typing import Any

import pytest

from app.cli.main import app
from app.feedback.unmatched import Reason, count_unmatched
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


async def test_votes_without_a_reply_are_shown(cli_harness: Harness) -> None:
    assert "unmatched" not in run(app, ["status"]).output
    project_id = (await cli_harness.policy()).project_id
    for _ in range(2):
        await count_unmatched(cli_harness.db, project_id, "langfuse", [Reason.UNKNOWN_REPLY, Reason.NO_REPLY_NAMED])
    output = run(app, ["status"]).output
    assert "unmatched votes of langfuse: 2 × unknown_reply, the last at " in output
    assert "unmatched votes of langfuse: 2 × no_reply_named, the last at " in output


async def test_feedback_is_given_once_and_listed(cli_harness: Harness) -> None:
    turn = await cli_harness.turn()
    for _ in range(2):
        result = run(
            app, ["feedback", "give", turn.id, "-1", "--source", "ada", "--id", "v-1", "--comment", "too long"]
        )
        assert result.exit_code == 0 and f": binary False on {turn.id} by HUMAN/ada" in result.output, result.output
    assert run(app, ["feedback", "give", turn.id, "4", "--kind", "rating"]).exit_code == 0
    assert run(app, ["feedback", "give", turn.id, "4", "--kind", "comment"]).exit_code == 0
    rows = json.loads(run(app, ["feedback", "list", turn.id, "--json"]).stdout)
    values: list[tuple[str, Any]] = [(row["kind"], row["raw_value"]) for row in rows]
    assert values == [("binary", False), ("rating", 4), ("comment", "4")]
    assert (rows[0]["comment"], rows[0]["outcome"]["state"]) == ("too long", "waiting")
    assert "HUMAN/ada" in run(app, ["feedback", "list", turn.id]).output


async def test_feedback_that_was_withdrawn_is_told_when_it_is_given_again(cli_harness: Harness) -> None:
    turn = await cli_harness.turn()
    arguments = ["feedback", "give", turn.id, "up", "--id", "v-1"]
    first = run(app, arguments)
    assert "does not count" not in first.output
    assert "does not count" not in run(app, arguments).output
    await cli_harness.api.delete(f"/v1/feedback/{first.output.partition(':')[0]}")
    again = run(app, arguments)
    assert again.exit_code == 0 and "it does not count: it was withdrawn" in again.output
    assert json.loads(run(app, [*arguments, "--json"]).stdout)["withdrawn"] is True


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["chatcmpl-0", "up"], "chatcmpl-0"),
        (["chatcmpl-0", "maybe"], "value"),
        (["chatcmpl-0", "many", "--kind", "rating"], "VALUE is not valid JSON"),
    ],
)
async def test_refused_feedback_says_why(cli_harness: Harness, arguments: list[str], message: str) -> None:
    result = run(app, ["feedback", "give", *arguments])
    assert result.exit_code == 1 and message in result.output
