"""The real openenv-core, unchanged, in a virtual environment of its own: its server, and agents that know how to win.

It is installed from the package index once, and kept; see tests/clients/third_party/environments.py.
"""

import asyncio
import os
import subprocess
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import httpx2
import pytest

from alignment.environments.errors import InfrastructureFailure
from alignment.environments.open_environment import open_environment
from alignment.environments.protocols import Agent, Limits, Outcome
from tests.clients.third_party.environments import QUIET, free_port, prepare
from tests.support.chat_agent import Reply, serve_agent, tool_call
from tests.support.openenv_server import ask_server, recordings

PINS = Path(__file__).with_name("packages")
START_SECONDS = 120.0
pytestmark = [pytest.mark.slow, pytest.mark.timeout(2400)]  # installing is part of it


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """Yield the URL of a server with the environments of packages/openenv/server.py."""
    folder, port = prepare("openenv", PINS), free_port()
    command = [str(folder / "bin" / "python"), "-I", str(PINS / "openenv" / "server.py"), str(port)]
    process = subprocess.Popen(command, env={**QUIET, "HOME": str(folder), "PATH": os.environ["PATH"]}, cwd=folder)
    url = f"http://127.0.0.1:{port}"
    try:
        wait_until_ready(f"{url}/guess/health", process)
        yield url
    finally:
        process.terminate()
        process.wait(10)


def wait_until_ready(url: str, process: subprocess.Popen[bytes]) -> None:
    gives_up_at = time.monotonic() + START_SECONDS
    while time.monotonic() < gives_up_at and process.poll() is None:
        try:
            if httpx2.get(url, trust_env=False).is_success:
                return
        except httpx2.HTTPError:
            time.sleep(0.2)
    raise RuntimeError(f"the server has not started: {process.poll()}")


async def play(name: str, reply: Reply, num_tasks: int = 4) -> list[Outcome]:
    """Play the first tasks, all at the same time. Return the outcomes in their order."""
    environment = open_environment(name)
    with serve_agent(reply) as url:
        tasks = islice(environment.tasks("train", 3), num_tasks)
        attempts = (environment.run(task, Agent(url, "k", "m", {}, task.id, Limits(max_turns=9))) for task in tasks)
        outcomes = await asyncio.gather(*attempts)
    await environment.close()
    return outcomes


def binary_search(messages: list[dict[str, Any]]) -> str:
    low, high = 1, 20
    for guessed, hint in zip(messages[1::2], messages[2::2], strict=True):
        number = int(guessed["content"])
        low, high = (number + 1, high) if hint["content"] == "higher" else (low, number - 1)
    return str((low + high) // 2)


async def test_texts(server: str) -> None:
    outcomes = await play(f"openenv:{server}/guess?sessions=8", binary_search, num_tasks=8)
    assert [outcome.reward for outcome in outcomes] == [1.0] * 8
    steps = [outcome.metrics["step_count"] for outcome in outcomes]
    assert max(steps) <= 5 and len(set(steps)) > 1, "each has a number of its own"
    again = await play(f"openenv:{server}/guess?sessions=8", binary_search, num_tasks=8)
    assert [outcome.metrics["step_count"] for outcome in again] == steps, "a task is the same each time"


async def test_reset_takes_parameters(server: str) -> None:
    environment = open_environment(f"openenv:{server}/guess", {"reset": {"number": 10}})
    with serve_agent(lambda messages: "10") as url:
        outcome = await environment.run(next(environment.tasks("train", 0)), Agent(url, "k", "m"))
    assert (outcome.reward, outcome.metrics["return"]) == (1.0, 4.0)


async def test_error_of_an_environment_is_a_failure_of_the_host(server: str) -> None:
    with pytest.raises(InfrastructureFailure, match=r"EXECUTION_ERROR\): invalid literal for int"):
        await play(f"openenv:{server}/guess", lambda messages: "seven", num_tasks=1)


async def test_attempts_wait_for_a_place(server: str) -> None:
    """The server has two."""
    outcomes = await play(f"openenv:{server}/grid", lambda messages: '{"row": 2, "column": 2}', num_tasks=6)
    assert [outcome.reward for outcome in outcomes] == [1.0] * 6


async def test_tools(server: str) -> None:
    def buy(messages: list[dict[str, Any]]) -> dict[str, Any]:
        return tool_call("look") if messages[-1]["role"] == "user" else tool_call("buy", fruit="apple")

    outcomes = await play(f"openenv:{server}/shop?sessions=8", buy)
    assert [(outcome.reward, outcome.reason) for outcome in outcomes] == [(-1.0, "completed")] * 4


@pytest.mark.parametrize("name", sorted(recordings()))
async def test_recorded_messages_are_what_the_server_says(server: str, name: str) -> None:
    """The fast tests play them."""
    recording = recordings()[name]
    assert await ask_server(f"{server}/{name}", [exchange["sent"] for exchange in recording["exchanges"]]) == recording
