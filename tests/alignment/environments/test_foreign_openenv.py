"""Environments of OpenEnv: recorded sessions of the real server, and servers that do what they should not.

The real server is in test_openenv_server.py.
"""

import asyncio
import json
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from websockets.asyncio.server import ServerConnection
from websockets.http11 import Request

from alignment.environments import openenv_session
from alignment.environments.errors import InfrastructureFailure
from alignment.environments.open_environment import open_environment
from alignment.environments.protocols import Agent, HasPlaces, Limits, Outcome
from alignment.environments.tools.base import JsonObject
from alignment.errors import UnavailableEnvironment
from tests.support.chat_agent import Reply, serve_agent, tool_call
from tests.support.openenv_server import answer_each, recordings, replay, serve_openenv

TEXT_ACTION: JsonObject = {
    "action": {"properties": {"metadata": {"type": "object"}, "text": {"type": "string"}}, "required": ["text"]}
}


async def play(
    url: str, reply: Reply, arguments: JsonObject | None = None, limits: Limits | None = None, num_tasks: int = 1
) -> list[Outcome]:
    environment = open_environment(f"openenv:{url}", arguments)
    with serve_agent(reply) as base_url:
        tasks = islice(environment.tasks("train", 3), num_tasks)
        outcomes = [
            await environment.run(task, Agent(base_url, "sk-ep-1", "m", {}, "ep-1", limits or Limits()))
            for task in tasks
        ]
    await environment.close()
    return outcomes


class Dialogue:
    """An agent that says these replies, and what it has seen before each."""

    def __init__(self, *replies: str | dict[str, Any]) -> None:
        self._replies = iter(replies)
        self.seen: list[str] = []

    def __call__(self, messages: list[dict[str, Any]]) -> str | dict[str, Any]:
        self.seen.append(messages[-1]["content"])
        return next(self._replies)


async def test_reply_is_the_only_field_of_an_action() -> None:
    agent = Dialogue("10", " 4\n")
    async with replay(recordings()["guess"]) as url:
        [outcome] = await play(url, agent)
    assert agent.seen == [
        "Reply with the guess (A number from 1 to 20).\n\nI think of a number from 1 to 20.",
        "lower",
    ]
    assert outcome.reward == 1.0, "it pays 4, and is limited"
    assert [step.reward for step in outcome.step_rewards] == [-0.125]
    assert outcome.metrics == {"return": 3.875, "step_count": 2.0} and outcome.reason == "completed"


async def test_rewards_are_scaled() -> None:
    async with replay(recordings()["guess"]) as url:
        [outcome] = await play(f"{url}?reward_scale=0.2", Dialogue("10", "4"))
    assert outcome.reward == pytest.approx(0.8) and outcome.step_rewards[0].reward == pytest.approx(-0.025)


async def test_actions_of_several_fields_are_json() -> None:
    agent = Dialogue("I do not know.", 'First {"row": 1, "column": 7}', 'Then {"row": 2, "column": 2}.')
    async with replay(recordings()["grid"]) as url:
        [outcome] = await play(url, agent)
    first, second, third = agent.seen
    hint = first.partition("\n")[0]
    assert hint.startswith("Reply with a JSON object that fits this schema: {") and "metadata" not in hint
    assert json.loads(hint.partition(": ")[2])["required"] == ["row", "column"]
    assert json.loads(first.rpartition("\n")[2]) == {"distance": 4, "tried": []}
    assert second == f"That is no action. {hint}"
    assert third == f"That is no action. column: Input should be less than or equal to 2. {hint}"
    assert outcome == Outcome(1.0, [], {"return": 1.0, "step_count": 1.0}, "completed")


async def test_calls_of_tools_are_steps_that_are_paid() -> None:
    calls = [tool_call("look"), tool_call("steal"), tool_call("buy", fruit="plum"), tool_call("buy", fruit="pear")]
    agent = Dialogue("Hello.", *calls)
    async with replay(recordings()["shop"]) as url:
        [outcome] = await play(url, agent)
    assert agent.seen == [
        "Use the tools.",
        "That is no action. Use the tools.",
        '["apple","pear"]',
        "Error: there is no tool 'steal'",
        "Error: Error calling tool 'buy': there is no plum",
    ]
    assert (outcome.reward, outcome.reason) == (1.0, "completed")


async def test_environment_with_actions_may_have_tools_too() -> None:
    read = {"name": "read_note", "arguments": '{"name": "city"}'}
    agent = Dialogue({"tool_calls": [{"id": "call-1", "type": "function", "function": read}]}, "Lisbon")
    async with replay(recordings()["notes"]) as url:
        [outcome] = await play(url, agent)
    assert agent.seen == ["Reply with the answer.\n\nWhich city does the note 'city' name?", "Lisbon"]
    assert outcome.reward == 1.0


def observation(done: bool = False, reward: float | None = None, **fields: Any) -> JsonObject:
    return {"type": "observation", "data": {"observation": fields, "done": done, "reward": reward}}


def failure(code: str, message: str = "no") -> JsonObject:
    return {"type": "error", "data": {"code": code, "message": message}}


def world(step: Callable[[str], JsonObject | str | None], **others: JsonObject) -> Callable[[JsonObject], Any]:
    """Return the answers of a server: `step` to an action's text, `others` to other messages."""
    answers = {"reset": observation(seen="Begin."), "mcp": failure("UNKNOWN_TYPE"), "state": failure("X")} | others

    def answer(message: JsonObject) -> JsonObject | str | None:
        data = message.get("data")
        return (
            step(str(data["text"]))
            if message["type"] == "step" and isinstance(data, dict)
            else answers[str(message["type"])]
        )

    return answer


async def test_third_mistake_in_a_row_ends_the_attempt() -> None:
    refusal: JsonObject = {"code": "VALIDATION_ERROR", "message": "Invalid", "errors": [{"loc": [], "msg": "too long"}]}
    answers = {"long": {"type": "error", "data": refusal}, "good": observation(seen="Go on.", reward=0.5)}
    agent = Dialogue("long", "", "good", "", "", "long")
    async with serve_openenv(TEXT_ACTION, answer_each(world(lambda text: answers[text]))) as url:  # type: ignore[arg-type, return-value]
        [outcome] = await play(url, agent)
    assert (outcome.reward, outcome.metrics) == (-1.0, {"return": 0.5, "invalid_action": 1.0})
    assert agent.seen[1] == "That is no action. too long. Reply with the text."


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (None, "has ended the session"),
        ("no JSON", "answered step with what is no message"),
        ('{"type": "observation", "data": {"reward": NaN}}', "a wrong reward"),
        ('{"type": "observation", "data": {"observation": "' + "x" * (1 << 20) + '"}}', "has ended the session"),
        (failure("EXECUTION_ERROR", "division by zero\nat x"), r"failed \(EXECUTION_ERROR\): division by zero$"),
        (failure("SESSION_ERROR"), r"failed \(SESSION_ERROR\): no"),
    ],
)
async def test_failures_of_the_server_are_failures_of_the_host(answer: JsonObject | str | None, message: str) -> None:
    async with serve_openenv(TEXT_ACTION, answer_each(world(lambda _: answer))) as url:
        with pytest.raises(InfrastructureFailure, match=message):
            await play(url, lambda messages: "go")


@pytest.mark.parametrize(
    ("reset", "message"),
    [
        (observation(done=True), "over before the first reply"),
        (failure("FACTORY_ERROR"), r"failed \(FACTORY_ERROR\)"),
    ],
)
async def test_world_that_does_not_begin_is_a_failure_of_the_host(reset: JsonObject, message: str) -> None:
    async with serve_openenv(TEXT_ACTION, answer_each(world(lambda _: None, reset=reset))) as url:
        with pytest.raises(InfrastructureFailure, match=message):
            await play(url, lambda messages: "go")


async def test_server_that_hangs_is_a_failure_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openenv_session, "CLOSE_SECONDS", 0.2)

    async def hang(connection: ServerConnection) -> None:
        await connection.wait_closed()

    async with serve_openenv(TEXT_ACTION, hang) as url:
        with pytest.raises(InfrastructureFailure, match="does not answer reset within"):
            await play(url, lambda messages: "go", {"start_seconds": 0.2})


async def test_server_that_is_away_is_a_failure_of_the_host() -> None:
    with pytest.raises(InfrastructureFailure, match="the OpenEnv server does not answer"):
        await play("http://127.0.0.1:9", lambda messages: "go")


async def test_attempt_waits_for_a_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """A session that has ended may still hold its place for a moment."""
    connections = 0
    serve_world = answer_each(world(lambda _: observation(done=True, reward=1.0)))

    async def handle(connection: ServerConnection) -> None:
        nonlocal connections
        connections += 1
        if connections < 3:
            await connection.send(json.dumps(failure("CAPACITY_REACHED", "1/1 sessions")))
        else:
            await serve_world(connection)

    async with serve_openenv(TEXT_ACTION, handle) as url:
        [outcome] = await play(url, lambda messages: "go")
        assert (outcome.reward, connections) == (1.0, 3)
        connections = 0
        monkeypatch.setattr(openenv_session, "FIRST_WAIT_SECONDS", 60.0)  # longer than it may take to start
        with pytest.raises(InfrastructureFailure, match="1/1 sessions"):
            await play(url, lambda messages: "go", {"start_seconds": 30})
        assert connections == 1


async def test_attempt_that_a_limit_ends_is_worth_what_the_user_says() -> None:
    async with serve_openenv(TEXT_ACTION, answer_each(world(lambda _: observation(seen="Go on.")))) as url:
        for arguments, reward in (({}, -1.0), ({"unfinished_reward": 0.0}, 0.0)):
            [outcome] = await play(url, lambda messages: "go", dict(arguments), Limits(max_turns=2))
            assert (outcome.reward, outcome.reason) == (reward, "max_turns")


async def test_tasks_are_rows_of_a_file_or_seeds(tmp_path: Path) -> None:
    resets: list[Any] = []

    def answer(message: JsonObject) -> JsonObject | None:
        if message["type"] == "reset":
            resets.append(message["data"])
        return world(lambda _: observation(done=True))(message)

    (tmp_path / "rows.jsonl").write_text('{"level": 1}\n{"level": 2, "seed": 7}\n')
    async with serve_openenv(TEXT_ACTION, answer_each(answer)) as url:
        arguments: JsonObject = {"tasks": str(tmp_path / "rows.jsonl"), "reset": {"level": 0, "mode": "easy"}}
        await play(url, lambda messages: "go", arguments, num_tasks=9)
        await play(url, lambda messages: "go", num_tasks=2)
    assert resets[:2] == [
        {"seed": 3, "level": 1, "mode": "easy", "episode_id": "ep-1"},
        {"seed": 7, "level": 2, "mode": "easy", "episode_id": "ep-1"},
    ]
    assert len({reset["seed"] for reset in resets[2:]}) == 2 == len(resets[2:])


async def test_part_of_an_observation_and_a_prompt() -> None:
    agent = Dialogue("go")
    seen = observation(board=[[1, 0]], secret="x", nothing=None)
    answers = answer_each(world(lambda _: observation(done=True), reset=seen))
    async with serve_openenv(TEXT_ACTION, answers) as url:
        await play(f"{url}?observation_field=board&prompt=Move.", agent)
    assert agent.seen == ["Move.\n\n[[1, 0]]"]


async def test_server_says_how_many_sessions_it_has() -> None:
    environment = open_environment("openenv:ws://127.0.0.1:9?sessions=8")
    assert isinstance(environment, HasPlaces) and await environment.max_concurrency() == 8


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("openenv:127.0.0.1:8000", "needs a URL such as"),
        ("openenv:", "needs a URL such as"),
        ("openenv:http://127.0.0.1:9?sessions=0", "the argument sessions .* greater than or equal to 1"),
        ("openenv:http://127.0.0.1:9?colour=1", "the argument colour"),
    ],
)
def test_arguments_are_checked(name: str, message: str) -> None:
    with pytest.raises(UnavailableEnvironment, match=message):
        open_environment(name)


async def test_another_server_is_the_users_mistake() -> None:
    async def refuse(connection: ServerConnection) -> None:
        await asyncio.sleep(0)

    async with serve_openenv({"detail": "x"}, refuse) as url:
        for path in ("", "/elsewhere"):
            with pytest.raises(UnavailableEnvironment, match="no server of OpenEnv"):
                await play(f"{url}{path}", lambda messages: "go")


def has_key(request: Request) -> bool:
    return request.headers.get("authorization") == "Bearer sk-server"


async def test_server_with_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERVER_KEY", "sk-server\n")
    answers = answer_each(world(lambda text: observation(done=True, reward=1.0)))
    async with serve_openenv(TEXT_ACTION, answers, has_key) as url:
        [outcome] = await play(f"{url}?key_variable=SERVER_KEY", Dialogue("yes"))
    assert outcome.reward == 1.0


@pytest.mark.parametrize("is_open", [has_key, lambda request: request.path == "/schema"])
async def test_refused_key_ends_the_run_and_is_not_shown(
    monkeypatch: pytest.MonkeyPatch, is_open: Callable[[Request], bool]
) -> None:
    monkeypatch.setenv("SERVER_KEY", "sk-wrong")
    answers = answer_each(world(lambda text: observation(done=True, reward=1.0)))
    async with serve_openenv(TEXT_ACTION, answers, is_open) as url:
        for name in (url, f"{url}?key_variable=SERVER_KEY"):
            with pytest.raises(
                UnavailableEnvironment, match=r"answered with 401: name the .* `key_variable`"
            ) as caught:
                await play(name, Dialogue("yes"))
            assert "sk-wrong" not in str(caught.value)


@pytest.mark.parametrize("value", [None, "", " ", "sk-\u00fc", "a\nb"])
def test_key_must_be_set(monkeypatch: pytest.MonkeyPatch, value: str | None) -> None:
    monkeypatch.delenv("SERVER_KEY", raising=False)
    if value is not None:
        monkeypatch.setenv("SERVER_KEY", value)
    for name in ("openenv:http://127.0.0.1:9?key_variable=SERVER_KEY", "http://127.0.0.1:9"):
        arguments: JsonObject = {"tasks": "rows.jsonl", "key_variable": "SERVER_KEY"} if name.startswith("http") else {}
        with pytest.raises(UnavailableEnvironment, match="the environment variable SERVER_KEY, which"):
            open_environment(name, arguments)
