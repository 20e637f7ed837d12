"""Commands environments list and run. Those that reach the service run as programs of their own, for Ctrl-C."""

import asyncio
import json
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections import Counter
from pathlib import Path

import pytest

from alignment.environments.run_summary import Result, summarize
from app.cli.environments import render
from app.cli.main import app
from app.core.settings import REPOSITORY
from app.models import Episode, Turn
from tests.support.cli import run
from tests.support.deployment import Harness
from tests.support.processes import PATIENCE_SECONDS, until
from tests.support.scripted_engine import ScriptedEngine

ROOMS = "tests.support.environments:Rooms"


async def start(*arguments: str, folder: Path = REPOSITORY) -> Process:
    """Start `attune environments run` as a program, with the variables of `cli_harness`."""
    command = [sys.executable, "-m", "app.cli.main", "environments", "run", *arguments]
    return await asyncio.create_subprocess_exec(
        *command, cwd=folder, env=dict(os.environ, PYTHONPATH=str(REPOSITORY)), stdout=PIPE, stderr=PIPE
    )


async def play(*arguments: str, folder: Path = REPOSITORY) -> tuple[int | None, str, str]:
    """Return the exit status, the output and the errors."""
    process = await start(*arguments, folder=folder)
    output, errors = await process.communicate()
    return process.returncode, output.decode(), errors.decode()


@pytest.mark.usefixtures("scripted")
async def test_run_plays_the_tasks_once(cli_harness: Harness) -> None:
    options = [ROOMS, "--tasks", "2", "--group", "2", "--run", "one", "--max-turns", "2", "--version", "leash"]
    options += ["--split", "test", "--seed", "5", "--arguments", '{"num_rooms": 4}']
    status, output, errors = await play(*options)
    assert status == 0, errors
    assert "4 of 4 attempts, mean reward -0.750" in errors
    assert "run one: 4 attempts" in output and "ends: max_turns 4" in output
    episodes = await cli_harness.all(Episode)
    assert sorted(row.task for row in episodes) == ["test-0", "test-0", "test-1", "test-1"]
    assert {(row.version_rule, row.max_turns, row.group_size) for row in episodes} == {("leash", 2, 2)}
    assert {row.request_metadata["environment"] for row in episodes} == {ROOMS}
    status, output, errors = await play(*options, "--json")
    again = json.loads(output)
    assert (status, again["num_attempts"], again["planned"]["done"]) == (0, 0, 4), errors
    status, _, errors = await play(*options[:-1], '{"num_rooms": 5}')
    assert status == 1 and "The run 'one' was begun with another 'metadata.arguments'" in errors
    [row] = json.loads(run(app, ["environments", "runs", "--json"]).output)
    assert (row["name"], row["attempts"]["done"], row["is_complete"]) == ("one", 4, True)
    shown = run(app, ["environments", "show", "one"]).output
    assert "attempts: 0 waiting, 0 under way, 4 done, 0 lost, 0 cancelled" in shown and "max_turns 4" in shown
    attempts = json.loads(run(app, ["environments", "attempts", "one", "--json"]).output)
    assert [(row["task_index"], row["state"], row["is_under_way"]) for row in attempts] == [
        (number, "done", False) for number in (0, 0, 1, 1)
    ]
    table = run(app, ["environments", "attempts", "one", "--after", attempts[0]["id"]]).output
    assert attempts[1]["episode"]["id"] in table and attempts[0]["id"] not in table
    assert f"environment: {ROOMS}" in shown and "limits of an attempt: max_turns 2, deadline_seconds 3600" in shown
    cancelled = run(app, ["environments", "cancel", "one"]).output
    assert "complete, cancelled" in cancelled and "0 cancelled" in cancelled, "all was played before"


@pytest.mark.usefixtures("cli_harness", "scripted")
async def test_run_without_a_reward_fails() -> None:
    name, faults = "tests.support.environments:Faulty", '{"faults": ["raise", "raise"]}'
    status, output, errors = await play(name, "--tasks", "1", "--arguments", faults)
    assert status == 1 and "1 planned attempts have no result: they were lost twice" in output
    assert "2 × KeyError: 'board' (environments.py:" in output and " in run)" in output
    assert errors.count("Traceback (most recent call last)") == 1, "that of the first error"
    assert 'raise KeyError("board")' in errors


async def test_interruption_abandons_the_open_attempt(cli_harness: Harness, scripted: ScriptedEngine) -> None:
    scripted.is_blocked = lambda reply: True
    process = await start(ROOMS, "--tasks", "3", "--concurrency", "1", "--json")

    async def chats() -> bool:
        return bool(scripted.running)

    await until(chats, PATIENCE_SECONDS, "the first chat")
    process.send_signal(signal.SIGINT)
    output, errors = await process.communicate()
    assert process.returncode == 130, errors.decode()
    assert not json.loads(output)["is_complete"]
    [episode] = await cli_harness.all(Episode)
    assert (episode.end_reason, episode.outcome) == ("abandoned", None)


@pytest.mark.usefixtures("cli_harness", "scripted")
async def test_unknown_policy() -> None:
    status, _, errors = await play(ROOMS, "--policy", "nobody")
    assert status == 1 and "There is no policy 'nobody'" in errors and "Traceback" not in errors


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "There is no environment 'nowhere'"),
        ([ROOMS, "--arguments", '{"doors": 1}'], "does not take these arguments"),
        ([ROOMS, "--arguments", "[]"], "--arguments is no JSON object"),
        ([ROOMS, "--version", "best"], "is none of follow, leash, pin"),
    ],
)
def test_mistakes_of_the_user(arguments: list[str], message: str) -> None:
    played = run(app, ["environments", "run", *arguments])
    assert played.exit_code != 0 and message in f"{played.output} {played.exception}"


def test_summary_names_the_simulated_users() -> None:
    results = [Result("task", f"ep-{n}", "completed", 1.0, 2, 9, user="model guest@v3") for n in range(2)]
    lines = list(render(summarize("run-1", results, 1.0, None)))
    assert "simulated user: model guest@v3, 2 attempts" in lines


def test_list() -> None:
    assert run(app, ["environments", "list", "--json"]).exit_code == 0


PLAYER = "python:tests.support.openai_player:play?num_chats=3"
PLAY = [PLAYER, "--tasks", "3", "--group", "2", "--python", sys.executable]


@pytest.mark.usefixtures("scripted")
async def test_function_in_another_interpreter_plays_with_its_own_client(cli_harness: Harness) -> None:
    status, output, errors = await play(*PLAY)
    assert status == 0 and "6 of 6 attempts, mean reward 0.750" in errors, errors
    assert "chats 3.000" in output
    episodes = await cli_harness.all(Episode)
    assert sorted(row.task for row in episodes) == ["train-0", "train-0", "train-1", "train-1", "train-2", "train-2"]
    assert {(row.end_reason, row.outcome) for row in episodes} == {("completed", 0.5)}
    turns = Counter(turn.episode_id for turn in await cli_harness.all(Turn))
    assert turns == {row.id: 3 for row in episodes}


@pytest.mark.usefixtures("scripted")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["python:no_module:play", "--python", sys.executable], "No module named 'no_module'"),
        ([PLAYER, "--python", "/no/python"], "/no/python cannot be started"),
    ],
)
async def test_environment_that_cannot_be_opened_ends_the_run(
    cli_harness: Harness, options: list[str], message: str
) -> None:
    status, _, errors = await play(*options)
    assert status == 1 and message in errors and "Traceback" not in errors
    assert {row.state for row in await cli_harness.all(Episode)} <= {"ended"}


NOISY = """
def play(task, agent):
    raise ValueError("\\n----\\n\\x1b[31mno such move\\x07\\nmore")
"""


@pytest.mark.usefixtures("scripted", "cli_harness")
async def test_error_of_another_interpreter_says_where_it_was_raised(tmp_path: Path) -> None:
    (tmp_path / "noisy_game.py").write_text(NOISY)
    status, output, errors = await play(
        *("python:noisy_game:play", "--tasks", "1", "--python", sys.executable), folder=tmp_path
    )
    assert status == 1 and "ValueError: [31mno such move (noisy_game.py:3 in play)" in output
    assert errors.count("Traceback (most recent call last)") == 1 and "raise ValueError" in errors
    assert not set(output + errors) & {"\x1b", "\x07"}, "control characters would reach the terminal"


def test_variables_of_other_interpreters_must_be_set() -> None:
    result = run(app, ["environments", "run", *PLAY, "--variable", "NO_SUCH_VARIABLE"])
    assert result.exit_code == 2 and "NO_SUCH_VARIABLE is not set" in result.output


@pytest.mark.parametrize(
    "option", [["--processes", "2"], ["--variable", "HOME"], ["--answer-seconds", "9"], ["--start-seconds", "9"]]
)
def test_options_of_processes_need_an_interpreter(option: list[str]) -> None:
    result = run(app, ["environments", "run", ROOMS, *option])
    assert result.exit_code == 2 and option[0] in result.output and "--python" in result.output
