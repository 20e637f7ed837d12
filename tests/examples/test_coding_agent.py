"""The coding agent: answers are graded in a real sandbox, also those that attack it."""

import asyncio
import re
import shutil
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from alignment.environments.open_environment import open_environment
from alignment.environments.protocols import Agent, Limits, Outcome, Task
from alignment.environments.sandbox.bubblewrap import BubblewrapSandbox
from app.models import Episode, Feedback, Turn
from examples.coding_agent import TEST, TRAIN, CodingAgent, Function, find_code
from tests.alignment.environments.sandbox.conftest import time_limit
from tests.conftest import skip_or_fail
from tests.support.chat_agent import Reply, serve_agent, tool_call
from tests.support.deployment import Harness
from tests.support.environments import open_run
from tests.support.scripted_engine import ScriptedEngine

RIGHT = "return [y for y in range(first, last + 1) if y % 4 == 0 and (y % 100 or y % 400 == 0)]"
SOLUTIONS = {
    "leap_years": f"    {RIGHT}",
    "count_vowels": "    return sum(letter in 'aeiou' for letter in text.lower())",
    "run_lengths": """
    from itertools import groupby
    return [(letter, len(list(run))) for letter, run in groupby(text)]""",
    "second_largest": "    return (sorted(set(numbers), reverse=True) + [None, None])[1]",
    "roman": """
    text = ""
    for value, letters in [(1000, "M"), (900, "CM"), (90, "XC"), (40, "XL"), (9, "IX"), (4, "IV"), (1, "I")]:
        text, number = text + letters * (number // value), number % value
    return text""",
}


@pytest.fixture
async def environment() -> AsyncIterator[CodingAgent]:
    if shutil.which("bwrap") is None:
        skip_or_fail("bubblewrap is not installed")
    environment = CodingAgent(seconds=20)
    yield environment
    await environment.close()


@pytest.fixture
def leap_years() -> Task:
    [function] = [function for function in TRAIN if function.signature.startswith("leap_years")]
    return Task("leap_years", {"stub": function.stub, "tests": function.tests})


async def play(environment: CodingAgent, task: Task, reply: Reply | str, max_turns: int = 6) -> Outcome:
    with serve_agent((lambda messages: reply) if isinstance(reply, str) else reply) as url:
        return await environment.run(task, Agent(url, "sk-ep-1", "m", limits=Limits(max_turns)))


async def play_answers(environment: CodingAgent, task: Task, answers: Mapping[str, str]) -> dict[str, float | None]:
    """Play attempts at the task with these answers, and return their rewards by name. All must be completed."""

    def reply(messages: list[dict[str, Any]]) -> str:
        name = str(messages[0]["content"]).rpartition("\n\n")[2]
        return f"```python\n{answers[name]}\n```"

    with serve_agent(reply) as url:
        agent = Agent(url, "sk-ep-1", "m")
        tasks = [Task(name, {"stub": name, "tests": task.data["tests"]}) for name in answers]
        outcomes = await asyncio.gather(*(environment.run(task, agent) for task in tasks))
    assert {outcome.reason for outcome in outcomes} == {"completed"}
    return {name: outcome.reward for name, outcome in zip(answers, outcomes, strict=True)}


def solve(task: Task) -> str:
    """Return the answer with the right function, in a text."""
    return f"This is the function:\n```python\n{task.data['stub']}{SOLUTIONS[task.id]}\n```\nI hope it helps."


@pytest.mark.parametrize(("split", "functions"), [("train", TRAIN), ("test", TEST)])
async def test_right_functions_pass_all_tests(
    environment: CodingAgent, split: str, functions: tuple[Function, ...]
) -> None:
    tasks = list(environment.tasks(split, 3))
    assert {str(task.data["stub"]) for task in tasks} == {function.stub for function in functions}
    outcomes = await asyncio.gather(*(play(environment, task, solve(task)) for task in tasks))
    assert [(outcome.reward, outcome.reason) for outcome in outcomes] == [(1.0, "completed")] * len(tasks)


async def test_reward_is_the_share_of_passed_tests(environment: CodingAgent, leap_years: Task) -> None:
    without_centuries = f"def leap_years(first, last):\n    {RIGHT.replace('y % 100 or', 'True or')}"
    assert (await play(environment, leap_years, without_centuries)).reward == 0.75
    assert (await play(environment, leap_years, "I cannot do that.")).reward == 0.0


@pytest.mark.parametrize("language", ["python", "Python", "python3", "py", ""])
def test_solution_is_found_among_other_blocks(language: str) -> None:
    solution = "def f(x):\n    return x\n"
    answer = f"```text\nplan\n```\nSo:\n```{language}\n{solution}```\nUse it:\n```python\nprint(f(3))\n```\nDone."
    assert find_code(answer, "f") == solution
    assert find_code(f"```{language}\n{solution}", "f") == solution, "the reply was cut"
    assert find_code(solution, "f") == solution
    assert find_code("```python\nf = abs\n```", "f") == "f = abs\n"


async def test_agent_sees_no_test_and_leaves_nothing_for_the_grading(
    environment: CodingAgent, leap_years: Task
) -> None:
    chats: list[list[dict[str, Any]]] = []

    def cheat(messages: list[dict[str, Any]]) -> str | dict[str, Any]:
        chats.append(messages)
        if len(messages) == 1:
            return tool_call("python", code="open('/tmp/answer', 'w').write('[1904]')\nprint('written')")
        return "```python\ndef leap_years(first, last):\n    return eval(open('/tmp/answer').read())\n```"

    outcome = await play(environment, leap_years, cheat)
    assert (outcome.reward, outcome.metrics) == (0.0, {"tool_calls": 1.0, "tool_faults": 0.0})
    assert chats[1][-1]["content"] == "written"
    assert not re.search("assert|1897", str(chats))


async def test_attempt_without_an_answer_is_worth_nothing(environment: CodingAgent, leap_years: Task) -> None:
    outcome = await play(environment, leap_years, lambda messages: tool_call("python", code="1"), max_turns=1)
    assert (outcome.reward, outcome.reason) == (0.0, "max_turns")


# Statements in front of the right result: where one succeeds, so do the tests.
ESCAPES = {
    "reads a file of the system": "open('/etc/passwd').read()",
    "reads a file of the repository": f"open({__file__!r}).read()",
    "reads its variables": "open('/proc/self/environ').read()",
    "writes a file of the host": "open('MARKER', 'w').close()",
    "forks": "import os; os.fork() or os._exit(0); os.wait()",
    "starts a program": "import subprocess; subprocess.run(['true'], check=True)",
    "opens a socket": "import socket; socket.socket().close()",
}


def escape_answers(marker: Path) -> dict[str, str]:
    return {
        name: f"def leap_years(first, last):\n    {statement.replace('MARKER', str(marker))}\n    {RIGHT}"
        for name, statement in ESCAPES.items()
    }


async def test_attempts_to_escape_are_worth_nothing(environment: CodingAgent, leap_years: Task, tmp_path: Path) -> None:
    rewards = await play_answers(environment, leap_years, escape_answers(tmp_path / "marker"))
    assert rewards == dict.fromkeys(ESCAPES, 0.0)
    assert not (tmp_path / "marker").exists()


async def test_attempts_succeed_without_a_sandbox(leap_years: Task, tmp_path: Path) -> None:
    """Otherwise they would prove nothing."""
    unsafe = CodingAgent(sandbox="unsafe", seconds=20)
    rewards = await play_answers(unsafe, leap_years, escape_answers(tmp_path / "marker"))
    await unsafe.close()
    assert rewards == dict.fromkeys(ESCAPES, 1.0)


HOSTILE = {
    "loops": "while True: pass",
    "loops when it is called": "def leap_years(first, last):\n    while True: pass",
    "forks without end": "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
    "takes memory": "rows = []\nwhile True: rows.append(bytearray(1 << 24))",
    "prints without end": "while True: print('x' * 65536)",
    "recurses": "import sys\nsys.setrecursionlimit(10 ** 9)\ndef f(): return f()\nf()",
    "kills all": "import os\nos.kill(os.getppid(), 9)\nos.kill(-1, 9)",
    "kills itself": "import os\nos.kill(os.getpid(), 9)",
    "crashes": "import ctypes\nctypes.string_at(0)",
    "leaves": "import os\nos._exit(0)",
    "leaves when it is called": "def leap_years(first, last):\n    raise SystemExit(0)",
    "closes its output": "import os\nos.close(1)\nos.close(2)",
    "prints results": 'import os\nprint(\'[{"value": 1}, {"value": 1}, {"value": 1}, {"value": 1}]\')\nos._exit(0)',
    "prints deep results": "import os\nprint('[' * 10 ** 5)\nos._exit(0)",
    "equals everything": (
        "class Any(int):\n    __eq__ = lambda self, other: True\n    __hash__ = int.__hash__\n"
        "def leap_years(first, last):\n    return Any()"
    ),
    "is no program": "def leap_years(first:",
    "has a NUL": "def leap_years(first, last):\n    return '\x00'",
    "is empty": "",
}


async def test_hostile_answers_are_worth_nothing(environment: CodingAgent, leap_years: Task) -> None:
    """None of them fails the sandbox, which grades the right answer before and after them."""
    right = {"right": f"def leap_years(first, last):\n    {RIGHT}"}
    assert await play_answers(environment, leap_years, right) == {"right": 1.0}
    with time_limit(environment._sandbox, 1):
        assert await play_answers(environment, leap_years, HOSTILE) == dict.fromkeys(HOSTILE, 0.0)
    assert await play_answers(environment, leap_years, right) == {"right": 1.0}


@pytest.mark.usefixtures("environment")
async def test_attempts_of_a_run(harness: Harness, live_url: str, scripted: ScriptedEngine) -> None:
    """The service has the outcome, and both turns, of which the first calls the tool."""
    opened = open_environment("examples.coding_agent:CodingAgent", {"seconds": 20})
    scripted.tool_call, scripted.answers_results = ("python", '{"code": "print(6 * 7)"}'), True
    scripted.reply_text = solve(next(opened.tasks("train", 0)))
    async with open_run(opened, live_url, harness.key) as run:
        summary = await run.run()
    assert scripted.requests[1]["messages"][-1]["content"] == "42"
    [episode] = await harness.all(Episode)
    assert (episode.end_reason, episode.outcome, summary.mean_reward) == ("completed", 1.0, 1.0)
    assert [turn.episode_id for turn in await harness.all(Turn)] == [episode.id] * 2


async def test_failure_of_the_sandbox_is_no_low_reward(
    harness: Harness, live_url: str, scripted: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = CodingAgent()
    monkeypatch.setattr(environment, "_sandbox", BubblewrapSandbox(program="no-such-program"))
    scripted.reply_text = "def leap_years(first, last): return True"
    async with open_run(environment, live_url, harness.key) as run:
        summary = await run.run()
    assert summary.ends == {"infrastructure": 2} and summary.mean_reward is None
    assert [(row.end_reason, row.outcome) for row in await harness.all(Episode)] == [("infrastructure", None)] * 2
    assert await harness.all(Feedback) == []
