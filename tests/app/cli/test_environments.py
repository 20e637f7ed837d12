"""Commands environments list and run."""

import json

import pytest

from app.cli.main import app
from app.models import Episode
from tests.support.cli import run
from tests.support.deployment import Harness

ROOMS = "tests.support.environments:Rooms"
pytestmark = pytest.mark.usefixtures("scripted")


async def test_run_plays_the_tasks(cli_harness: Harness) -> None:
    played = run(app, ["environments", "run", ROOMS, "--tasks", "2", "--group", "2", "--run", "one"])
    assert played.exit_code == 0, played.output
    assert "4 of 4 attempts, mean reward 0.750" in played.stderr
    assert "run one: 4 attempts" in played.stdout and "ends: completed 4" in played.stdout
    assert [row.policy_id for row in await cli_harness.all(Episode)] == [(await cli_harness.policy()).id] * 4
    again = run(app, ["environments", "run", ROOMS, "--tasks", "2", "--group", "2", "--run", "one", "--json"])
    assert json.loads(again.stdout)["num_replayed"] == 4


async def test_arguments_and_limits(cli_harness: Harness) -> None:
    options = ["--tasks", "1", "--max-turns", "2", "--version", "leash", "--split", "test", "--seed", "5"]
    arguments = ["--arguments", '{"num_rooms": 4}']
    played = run(app, ["environments", "run", ROOMS, *options, *arguments, "--json"])
    assert json.loads(played.stdout)["ends"] == {"max_turns": 1}
    [episode] = await cli_harness.all(Episode)
    assert (episode.task, episode.version_rule, episode.max_turns) == ("test-0", "leash", 2)
    assert episode.request_metadata["seed"] == "5" and episode.request_metadata["environment"] == ROOMS


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "There is no environment 'nowhere'"),
        ([ROOMS, "--policy", "nobody"], "There is no policy 'nobody'"),
        ([ROOMS, "--arguments", '{"doors": 1}'], "does not take these arguments"),
        ([ROOMS, "--arguments", "[]"], "--arguments is no JSON object"),
        ([ROOMS, "--version", "best"], "is none of follow, leash, pin"),
    ],
)
async def test_mistakes_of_the_user(cli_harness: Harness, arguments: list[str], message: str) -> None:
    played = run(app, ["environments", "run", *arguments])
    assert played.exit_code != 0 and message in f"{played.output} {played.exception}"
    assert await cli_harness.all(Episode) == []


async def test_run_without_a_reward_fails(cli_harness: Harness) -> None:
    name, faults = "tests.support.environments:Faulty", '{"faults": ["raise", "raise"]}'
    played = run(app, ["environments", "run", name, "--tasks", "1", "--arguments", faults])
    assert played.exit_code == 1 and "1 planned attempts were lost twice" in played.stdout
    assert "2 × KeyError: 'board'" in played.stdout


def test_list() -> None:
    assert run(app, ["environments", "list", "--json"]).exit_code == 0
