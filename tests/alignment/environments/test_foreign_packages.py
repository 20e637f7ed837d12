"""Real packages of others, unchanged, each in a virtual environment of its own, played by agents that know how to win.

The environments are installed from the package index once, and kept; see tests/clients/third_party/environments.py.
"""

import asyncio
import os
import re
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from alignment.environments.errors import EnvironmentFailure
from alignment.environments.host_process import HostConfig
from alignment.environments.open_environment import open_environment
from alignment.environments.protocols import Agent, Limits, Outcome, Task
from alignment.errors import UnavailableEnvironment
from app.core.settings import REPOSITORY
from tests.clients.third_party.environments import prepare
from tests.support.chat_agent import Reply, serve_agent, tool_call
from tests.support.scripted_engine import serve

PINS = Path(__file__).with_name("packages")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(2400)]  # installing is part of it


@pytest.fixture(scope="session")
def games() -> HostConfig:
    return HostConfig(python=prepare("games", PINS) / "bin" / "python")


async def play(
    name: str, host: HostConfig, reply: Reply, num_tasks: int = 4, limits: Limits | None = None, split: str = "train"
) -> list[Outcome]:
    """Play the first tasks, all at the same time, each with a key of its own. Return the outcomes in their order."""
    environment = open_environment(name, host=host)
    keys: list[str] = []
    try:
        tasks = list(islice(environment.tasks(split, 3), num_tasks))
        with serve_agent(reply, keys) as url:
            attempts = (
                environment.run(task, Agent(url, f"sk-ep-{task.id}", "m", {}, task.id, limits or Limits()))
                for task in tasks
            )
            outcomes = await asyncio.gather(*attempts)
        assert set(keys) == {f"sk-ep-{task.id}" for task in tasks}
    finally:
        await environment.close()
    return outcomes


def binary_search(messages: list[dict[str, Any]]) -> str:
    """Guess the number."""
    found = re.search(r"number between (\d+) and (\d+)", messages[0]["content"])
    assert found
    low, high = int(found[1]), int(found[2])
    for guessed, hint in zip(messages[1::2], messages[2::2], strict=True):
        number = int(re.findall(r"\d+", guessed["content"])[0])
        assert "higher" in hint["content"] or "lower" in hint["content"]
        low, high = (number + 1, high) if "higher" in hint["content"] else (low, number - 1)
    return f"I guess [{(low + high) // 2}]"


async def test_textarena(games: HostConfig) -> None:
    outcomes = await play("textarena:GuessTheNumber-v0?max_number=15", games, binary_search, num_tasks=8)
    assert [outcome.reward for outcome in outcomes] == [1.0] * 8
    turns = [outcome.metrics["turns"] for outcome in outcomes]
    assert max(turns) <= 4 and len(set(turns)) > 1
    again = await play("textarena:GuessTheNumber-v0?max_number=15", games, binary_search, num_tasks=8)
    assert [outcome.metrics["turns"] for outcome in again] == turns, "a task is the same game each time"


async def test_textarena_pays_what_is_won_alone(games: HostConfig) -> None:
    """The game pays for a near miss."""
    name = "textarena:GuessTheNumber-v0?min_number=1&max_number=1000&max_turns=2"
    lost = await play(name, games, lambda messages: f"[{400 + len(messages)}]")
    assert [outcome.reward for outcome in lost] == [-1.0] * 4
    assert all(0.0 <= outcome.metrics["score"] < 1.0 for outcome in lost)
    stalled = await play(name, games, lambda messages: "[400]", limits=Limits(max_turns=1))
    assert [(outcome.reward, outcome.reason) for outcome in stalled] == [(-1.0, "max_turns")] * 4
    partly = await play(f"{name}&partial_credit=true", games, lambda messages: f"[{400 + len(messages)}]")
    assert [outcome.reward for outcome in partly] == [outcome.metrics["score"] for outcome in lost]


def add(messages: list[dict[str, Any]]) -> str:
    numbers = re.findall("[+-]? ?[0-9]+", messages[-1]["content"])
    return f"It is <answer>{sum(int(number.replace(' ', '')) for number in numbers)}</answer>"


async def test_reasoning_gym(games: HostConfig) -> None:
    name = "reasoning_gym:chain_sum?min_digits=1&max_digits=2"
    assert [outcome.reward for outcome in await play(name, games, add)] == [1.0] * 4

    def junk(messages: list[dict[str, Any]]) -> str:
        return add(messages).replace("<answer>", "").replace("</answer>", "")

    wrong = await play(name, games, junk)
    assert [outcome.reward for outcome in wrong] == [-1.0] * 4
    assert all(0.0 < outcome.metrics["score"] < 1.0 for outcome in wrong), "the answer is in the reply"


async def test_gymnasium(games: HostConfig) -> None:
    path = iter("112122")  # through the default map

    def walk(messages: list[dict[str, Any]]) -> str:
        if len(messages) == 1:
            assert messages[0]["content"].startswith("FrozenLake-v1. Reply with a whole number from 0 to 3.\n\n[S]FFF")
            return "I do not know yet."
        if len(messages) == 3:
            assert messages[2]["content"] == "That is no action. Reply with a whole number from 0 to 3."
        return f"My move is {next(path)}."

    [outcome] = await play("gymnasium:FrozenLake-v1?is_slippery=false", games, walk, num_tasks=1)
    assert outcome == Outcome(1.0, [], {"return": 1.0}, "completed")


async def test_gymnasium_with_arrays(games: HostConfig) -> None:
    def push(messages: list[dict[str, Any]]) -> str:
        return "Push: [0.5]"

    name = "gymnasium:Pendulum-v1?max_episode_steps=3&reward_scale=0.05"
    [outcome] = await play(name, games, push, num_tasks=1)
    assert outcome.reason == "max_turns" and len(outcome.step_rewards) == 2 and outcome.reward is not None
    total = outcome.reward + sum(step.reward for step in outcome.step_rewards)
    assert total == pytest.approx(0.05 * outcome.metrics["return"])


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("textarena:NoGame-v0", "NoGame-v0 not found"),
        ("textarena:GuessTheNumber-v0?colour=1", "colour"),
        ("textarena:TicTacToe-v0", "players"),
        ("reasoning_gym:no_name", "'no_name' not registered"),
        ("gymnasium:NoWorld-v0", "NoWorld"),
    ],
)
async def test_what_a_package_does_not_have_is_the_users_mistake(games: HostConfig, name: str, message: str) -> None:
    environment = open_environment(name, host=games)
    with pytest.raises(UnavailableEnvironment, match=message):
        await environment.run(Task("train-0"), Agent("http://127.0.0.1:9/v1", "sk-ep-1", "m"))
    await environment.close()


@pytest.fixture
def multiply() -> HostConfig:
    """The example environment of verifiers, with a tool."""
    return HostConfig(python=prepare("verifiers", PINS) / "bin" / "python", paths=(REPOSITORY / "examples",))


def call_multiply(messages: list[dict[str, Any]]) -> str | dict[str, Any]:
    if messages[-1]["role"] == "tool":
        return str(messages[-1]["content"])
    return tool_call("multiply", a=int(messages[-1]["content"].split()[0]), b=3)


async def test_verifiers(multiply: HostConfig) -> None:
    name = "verifiers:multiply-env?num_rows=5"
    outcomes = await play(name, multiply, call_multiply, num_tasks=9)
    assert [(outcome.reward, outcome.reason) for outcome in outcomes] == [(1.0, "completed")] * 5
    assert outcomes[0].metrics["multiply_calls"] == 1.0
    endless = await play(name, multiply, lambda messages: tool_call("multiply", a=1, b=1), num_tasks=1)
    assert [(outcome.reward, outcome.reason) for outcome in endless] == [(0.0, "max_turns")]


async def test_verifiers_has_no_tasks_of_a_split_without_data(multiply: HostConfig) -> None:
    environment = open_environment("verifiers:multiply-env", host=multiply)
    with pytest.raises(Exception, match="no data set for evaluation"):
        next(environment.tasks("test", 0))


@pytest.fixture
def tasksets() -> HostConfig:
    """verifiers 0.4, and a taskset with a tool. The first attempt downloads the packages of its chat loop, by uv."""
    folder = prepare("verifiers_v1", PINS)
    certificates = {name: os.environ[name] for name in ("SSL_CERT_FILE", "SSL_CERT_DIR") if name in os.environ}
    variables = {"HOME": str(folder), **certificates}
    return HostConfig(
        python=folder / "bin" / "python", paths=(PINS / "verifiers_v1", REPOSITORY / "examples"), environment=variables
    )


def call_calculator(messages: list[dict[str, Any]]) -> str | dict[str, Any]:
    if messages[-1]["role"] == "tool":
        return str(messages[-1]["content"])
    return tool_call("calculator_multiply", a=int(messages[-1]["content"].split()[0]), b=3)


async def test_verifiers_v1(tasksets: HostConfig) -> None:
    outcomes = await play("verifiers.v1:multiply-taskset?num_rows=3", tasksets, call_calculator, num_tasks=9)
    assert [(outcome.reward, outcome.reason) for outcome in outcomes] == [(1.0, "completed")] * 3
    assert outcomes[0].metrics == {"turns": 2.0, "score": 1.0}
    endless = await play(
        "verifiers.v1:multiply-taskset",
        tasksets,
        lambda messages: tool_call("calculator_multiply", a=1, b=1),
        num_tasks=1,
        limits=Limits(max_turns=2),
    )
    assert [(outcome.reward, outcome.reason) for outcome in endless] == [(0.0, "max_turns")], "it is scored"


async def play_refused(name: str, host: HostConfig, code: str) -> Outcome:
    """Play a task with a service that refuses each chat with this code."""

    async def refuse(_: Request) -> JSONResponse:
        return JSONResponse({"error": {"code": code, "message": "no", "type": "x", "param": None}}, 409)

    environment = open_environment(name, host=host)
    try:
        with serve(Starlette(routes=[Route("/v1/chat/completions", refuse, methods=["POST"])])) as url:
            task = next(environment.tasks("train", 0))
            return await environment.run(task, Agent(f"{url}/v1", "sk-ep-1", "m"))
    finally:
        await environment.close()


async def test_verifiers_sees_why_the_service_refuses_a_chat(multiply: HostConfig) -> None:
    outcome = await play_refused("verifiers:multiply-env", multiply, "episode_max_turns")
    assert (outcome.reward, outcome.reason) == (0.0, "max_turns")
    with pytest.raises(EnvironmentFailure, match="409"):
        await play_refused("verifiers:multiply-env", multiply, "other")


async def test_verifiers_v1_sees_why_the_service_refuses_a_chat(tasksets: HostConfig) -> None:
    outcome = await play_refused("verifiers.v1:multiply-taskset", tasksets, "episode_deadline")
    assert outcome == Outcome(-1.0, [], {"score": -1.0}, "deadline")
    with pytest.raises(EnvironmentFailure, match="ProviderError: upstream 409"):
        await play_refused("verifiers.v1:multiply-taskset", tasksets, "other")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("verifiers.v1:no-taskset", "taskset 'no-taskset' not found"),
        ("verifiers.v1:multiply-taskset?colour=1", "taskset.colour: Extra inputs are not permitted"),
        ("verifiers:multiply-env", r"has no load_environment: environments are `verifiers\.v1:NAME`"),
    ],
)
async def test_what_verifiers_v1_does_not_have_is_the_users_mistake(
    tasksets: HostConfig, name: str, message: str
) -> None:
    with pytest.raises(UnavailableEnvironment, match=message):
        next(open_environment(name, host=tasksets).tasks("train", 0))


async def test_verifiers_v1_needs_a_later_version(multiply: HostConfig) -> None:
    with pytest.raises(UnavailableEnvironment, match=r"is too old: before 0\.4, environments are `verifiers:NAME`"):
        next(open_environment("verifiers.v1:multiply-env", host=multiply).tasks("train", 0))


GRAPH = """
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.prebuilt import create_react_agent

@tool
def multiply(a: int, b: int) -> int:
    \"\"\"Multiply two numbers.\"\"\"
    return a * b

def tasks(split, seed):
    for number in range(4):
        yield {"question": f"{number} times 3?", "answer": str(3 * number)}

async def play(task, agent):
    model = ChatOpenAI(base_url=agent.base_url, api_key=agent.api_key, model=agent.model)
    graph = create_react_agent(model, [multiply])
    state = await graph.ainvoke({"messages": [("user", task.data["question"])]})
    return 1.0 if state["messages"][-1].content == task.data["answer"] else -1.0
"""


async def test_langgraph(tmp_path: Path) -> None:
    (tmp_path / "graph.py").write_text(GRAPH)
    host = HostConfig(python=prepare("langgraph") / "bin" / "python", paths=(tmp_path,))
    outcomes = await play("python:graph:play", host, call_multiply)
    assert [outcome.reward for outcome in outcomes] == [1.0] * 4
