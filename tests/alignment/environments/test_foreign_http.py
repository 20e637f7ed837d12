"""Environments behind HTTP, on a server with the wire of NeMo Gym's resources servers."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from alignment.environments.errors import InfrastructureFailure
from alignment.environments.open_environment import open_environment
from alignment.environments.protocols import Agent, Environment, Limits, Outcome
from alignment.errors import UnavailableEnvironment
from tests.support.chat_agent import serve_agent, tool_call
from tests.support.scripted_engine import serve

TOOL = {
    "type": "function",
    "name": "count",
    "description": "Count.",
    "parameters": {"type": "object", "properties": {"by": {"type": "integer"}}},
    "strict": True,
}


def row(target: int) -> dict[str, Any]:
    system = {"role": "developer", "content": [{"type": "input_text", "text": "Be short."}]}
    params = {"input": [system, {"role": "user", "content": f"Count to {target}."}], "tools": [TOOL]}
    return {"responses_create_params": params, "target": target}


class Counter:
    """The server. It counts for each session, and pays for the target if the last message names it."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}
        self.verified: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.only_key: str | None = None

    async def seed_session(self, request: Request) -> Response:
        assert "target" in await request.json()
        self.keys.append(request.headers.get("authorization"))
        if self.only_key is not None and self.keys[-1] != self.only_key:
            return JSONResponse({"detail": "who are you?"}, 403)
        response = JSONResponse({})
        response.set_cookie("session", uuid4().hex)
        return response

    async def count(self, request: Request) -> Response:
        arguments = await request.json()
        if not isinstance(arguments.get("by"), int):
            return JSONResponse({"detail": "by is no number"}, 422)
        if arguments["by"] == 500:
            return Response("broken", 500)
        session = request.cookies["session"]
        self.counts[session] = self.counts.get(session, 0) + arguments["by"]
        return JSONResponse({"count": self.counts[session]})

    async def verify(self, request: Request) -> Response:
        body = await request.json()
        self.verified.append(body["response"])
        if body["target"] == 0:
            return JSONResponse({"no": "reward"})
        if body["target"] == 1000:
            return Response('{"reward": NaN}')
        last = body["response"]["output"][-1]
        is_right = last["type"] == "message" and str(body["target"]) in last["content"][0]["text"]
        return JSONResponse({"reward": 3.0 if is_right else 0.0})

    def app(self) -> Starlette:
        paths = {"/seed_session": self.seed_session, "/count": self.count, "/verify": self.verify}
        return Starlette(routes=[Route(path, endpoint, methods=["POST"]) for path, endpoint in paths.items()])


@pytest.fixture
def counter() -> Counter:
    return Counter()


@pytest.fixture
def open_rows(counter: Counter, tmp_path: Path) -> Iterator[Callable[..., Environment]]:
    """Return a function that opens the server's environment with rows for these targets."""
    with serve(counter.app()) as url:

        def open_targets(*targets: int, **arguments: str) -> Environment:
            file = tmp_path / "rows.jsonl"
            file.write_text("".join(json.dumps(row(target)) + "\n" for target in targets))
            return open_environment(url, {"tasks": str(file), **arguments})

        yield open_targets


async def play(
    environment: Environment, reply: Callable[[list[dict[str, Any]]], Any], limits: Limits | None = None
) -> list[Outcome]:
    with serve_agent(reply) as url:
        tasks = list(environment.tasks("train", 0))
        outcomes = [
            await environment.run(task, Agent(url, "sk-ep-1", "m", limits=limits or Limits())) for task in tasks
        ]
    await environment.close()
    return outcomes


def count_to_target(messages: list[dict[str, Any]]) -> str | dict[str, Any]:
    assert messages[0] == {"role": "system", "content": "Be short."}
    if messages[-1]["role"] == "tool":
        return f"It is {json.loads(messages[-1]['content'])['count']}."
    return tool_call("count", by=int(messages[-1]["content"].split()[-1].rstrip(".")))


async def test_attempts_have_sessions_and_their_answers_are_verified(
    open_rows: Callable[..., Environment], counter: Counter
) -> None:
    outcomes = await play(open_rows(3, 4), count_to_target)
    assert [(outcome.reward, outcome.metrics["score"]) for outcome in outcomes] == [(1.0, 3.0)] * 2
    assert sorted(counter.counts.values()) == [3, 4], "each has a session of its own"
    kinds = [item["type"] for item in counter.verified[0]["output"]]
    assert kinds == ["function_call", "function_call_output", "message"]


async def test_key_of_the_server_is_sent(
    open_rows: Callable[..., Environment], counter: Counter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SERVER_KEY", "sk-server")
    for arguments in ({}, {"key_variable": "SERVER_KEY"}):
        await play(open_rows(3, **arguments), count_to_target)
    assert counter.keys == [None, "Bearer sk-server"]


async def test_refused_key_ends_the_run_and_is_not_shown(
    open_rows: Callable[..., Environment], counter: Counter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SERVER_KEY", "sk-wrong")
    counter.only_key = "Bearer sk-server"
    for arguments in ({}, {"key_variable": "SERVER_KEY"}):
        with pytest.raises(UnavailableEnvironment, match=r"answered with 403: name the .* `key_variable`") as caught:
            await play(open_rows(3, **arguments), count_to_target)
        assert "sk-wrong" not in str(caught.value)


async def test_attempt_that_never_answers_is_lost(open_rows: Callable[..., Environment]) -> None:
    """Without an answer there is nothing to verify, and stalling would pay more than a wrong answer."""
    limits = Limits(max_turns=2)
    [outcome] = await play(open_rows(3), lambda messages: tool_call("count", by=1), limits)
    assert (outcome.reward, outcome.reason) == (-1.0, "max_turns")


async def test_mistakes_of_the_agent_are_shown_to_it(open_rows: Callable[..., Environment]) -> None:
    seen: list[str] = []
    calls: Iterator[str | dict[str, Any]] = iter(
        [tool_call("count", by="x"), tool_call("shout"), tool_call("seed_session"), "I give up."]
    )

    def fail(messages: list[dict[str, Any]]) -> str | dict[str, Any]:
        seen.append(str(messages[-1]["content"]))
        return next(calls)

    [outcome] = await play(open_rows(3), fail)
    assert outcome.reward == 0.0
    assert json.loads(seen[1]) == {"detail": "by is no number"}
    assert seen[2:] == ["Error: there is no tool 'shout'", "Error: there is no tool 'seed_session'"]


@pytest.mark.parametrize(
    ("target", "message"),
    [(500, "answered a call of count with 500"), (0, "answered /verify without a reward"), (1000, "without a reward")],
)
async def test_failures_of_the_server_are_failures_of_the_host(
    open_rows: Callable[..., Environment], target: int, message: str
) -> None:
    with pytest.raises(InfrastructureFailure, match=message):
        await play(open_rows(target), count_to_target)


async def test_server_that_is_away_is_a_failure_of_the_host(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps(row(1)))
    environment = open_environment("http://127.0.0.1:9", {"tasks": str(tmp_path / "rows.jsonl")})
    with pytest.raises(InfrastructureFailure, match="the environment's server does not answer"):
        await play(environment, count_to_target)


@pytest.mark.parametrize("arguments", [{}, {"tasks": 3}, {"tasks": "a", "colour": 1}])
def test_arguments_are_checked(arguments: dict[str, Any]) -> None:
    with pytest.raises(UnavailableEnvironment, match="takes `tasks`"):
        open_environment("http://127.0.0.1:9", arguments)


@pytest.mark.parametrize("text", [None, "[1]\n", '{"a": 1}\n', '{"responses_create_params": {"input": 3}}\n'])
async def test_rows_are_checked(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "rows.jsonl").write_text(text)
    environment = open_environment("http://127.0.0.1:9", {"tasks": str(tmp_path / "rows.jsonl")})
    with pytest.raises(UnavailableEnvironment):
        await play(environment, count_to_target)
