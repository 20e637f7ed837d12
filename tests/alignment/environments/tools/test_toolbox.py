"""Limits, the model's mistakes as messages, and failures of the host as exceptions."""

import asyncio
from dataclasses import dataclass, field

import pytest
from pydantic import ValidationError

from alignment.environments.errors import InfrastructureFailure, ToolError
from alignment.environments.tools.base import EpisodeContext, JsonObject, Tool, ToolResult
from alignment.environments.tools.limits import ToolLimits
from alignment.environments.tools.toolbox import Fault, Toolbox
from tests.support.tool_calls import EPISODE, assistant, call_one


@dataclass
class Life:
    """What happened to a state, in order."""

    episode: str
    events: list[str] = field(default_factory=list)


class Echo(Tool[Life]):
    """Returns its text, or raises what the text names."""

    name = "echo"
    description = "Repeat a text."
    parameters: JsonObject = {  # noqa: RUF012
        "type": "object",
        "properties": {"text": {"type": "string", "pattern": "^[^!]*$"}, "times": {"type": "integer"}},
        "required": ["text"],
        "additionalProperties": False,
    }

    def __init__(self) -> None:
        self.lives: list[Life] = []
        self.num_running = 0
        self.peak = 0

    async def create(self, episode: EpisodeContext) -> Life:
        await asyncio.sleep(0)
        self.lives.append(Life(episode.id))
        return self.lives[-1]

    async def execute(self, state: Life, arguments: JsonObject) -> ToolResult:
        text = str(arguments["text"])
        state.events.append(text)
        self.num_running += 1
        self.peak = max(self.peak, self.num_running)
        try:
            await asyncio.sleep(0.01)
            match text:
                case "hang":
                    await asyncio.sleep(60)
                case "refuse":
                    raise ToolError("that is not allowed")
                case "time out inside":
                    raise TimeoutError("a query took too long")
                case "connect":
                    raise ConnectionRefusedError("[Errno 111]")
                case "connect below":
                    error = OSError("all failed")
                    error.__cause__ = ConnectionResetError()
                    raise RuntimeError("no database") from error
                case "sandbox":
                    raise InfrastructureFailure("the sandbox is missing")
                case "bug":
                    raise ValueError("no such order")
            return ToolResult(text * int(str(arguments.get("times", 1))), reward=0.25)
        finally:
            self.num_running -= 1

    async def reward(self, state: Life) -> float:
        return float(len(state.events))

    async def release(self, state: Life) -> None:
        state.events.append("released")


MISTAKES = [
    ("eco", {"text": "a"}, Fault.UNKNOWN_TOOL, "Error: there is no tool 'eco'; there are: echo"),
    ("", {"text": "a"}, Fault.UNKNOWN_TOOL, "Error: there is no tool ''; there are: echo"),
    ("echo", '{"text": "a"', Fault.BAD_ARGUMENTS, "Error: the arguments are not valid JSON: Expecting ',' delimiter"),
    ("echo", '{"text": NaN}', Fault.BAD_ARGUMENTS, "Error: the arguments are not valid JSON: NaN is not JSON"),
    ("echo", '["a"]', Fault.BAD_ARGUMENTS, "Error: the arguments must be a JSON object"),
    ("echo", "[" * 100_000, Fault.BAD_ARGUMENTS, "Error: the arguments are not valid JSON"),
    ("echo", '{"text": "\\ud800"}', Fault.BAD_ARGUMENTS, "Error: the arguments are not valid Unicode"),
    ("echo", '{"text": "a", "\\udfff": 1}', Fault.BAD_ARGUMENTS, "Error: the arguments are not valid Unicode"),
    ("echo", "", Fault.BAD_ARGUMENTS, "Error: 'text' is a required property"),
    ("echo", {"text": 7}, Fault.BAD_ARGUMENTS, "Error: text: 7 is not of type 'string'"),
    ("echo", {"text": "a!"}, Fault.BAD_ARGUMENTS, "Error: text: 'a!' does not match"),
    ("echo", {"text": "a", "x": 1}, Fault.BAD_ARGUMENTS, "Error: Additional properties are not allowed"),
    ("echo", {"text": "hang"}, Fault.TIMEOUT, "Error: no result within 2 s"),
    ("echo", {"text": "refuse"}, Fault.EXCEPTION, "Error: that is not allowed"),
    ("echo", {"text": "bug"}, Fault.EXCEPTION, "Error: ValueError: no such order"),
    ("echo", {"text": "time out inside"}, Fault.EXCEPTION, "Error: TimeoutError: a query took too long"),
]


@pytest.mark.parametrize(("name", "arguments", "fault", "text"), MISTAKES)
async def test_model_sees_its_mistake(name: str, arguments: object, fault: Fault, text: str) -> None:
    async with Toolbox([Echo()], ToolLimits(call_seconds=2.0)).open(EPISODE) as tools:
        first, second = await tools.execute(assistant((name, arguments), ("echo", {"text": "b", "times": 2})))
        assert first["tool_call_id"] == "call-0" and first["content"].startswith(text)
        assert second["content"] == "bb", "the other calls of the turn are executed"
        assert [record.fault for record in tools.records] == [fault, None]
        assert tools.count_faults() == {fault: 1}


@pytest.mark.parametrize("text", ["connect", "connect below", "sandbox"])
async def test_failure_of_the_host_is_raised_and_the_other_calls_end(text: str) -> None:
    echo = Echo()
    with pytest.raises(InfrastructureFailure):
        async with Toolbox([echo]).open(EPISODE) as tools:
            await tools.execute(assistant(("echo", {"text": "hang"}), ("echo", {"text": text})))
    assert echo.num_running == 0
    assert echo.lives[0].events[-1] == "released"


async def test_failed_creation_is_a_failure_of_the_host() -> None:
    class Broken(Echo):
        async def create(self, episode: EpisodeContext) -> Life:
            raise ValueError("no room")

    with pytest.raises(InfrastructureFailure, match=r"'echo' could not be created: ValueError: no room"):
        await call_one(Broken(), {"text": "a"})


async def test_slow_creation_is_a_failure_of_the_host() -> None:
    class Slow(Echo):
        async def create(self, episode: EpisodeContext) -> Life:
            await asyncio.sleep(60)
            raise AssertionError

    with pytest.raises(InfrastructureFailure, match="TimeoutError"):
        await call_one(Slow(), {"text": "a"}, ToolLimits(create_seconds=0.05))


async def test_calls_of_a_turn_run_at_the_same_time_with_one_state() -> None:
    echo = Echo()
    async with Toolbox([echo]).open(EPISODE) as tools:
        messages = await tools.execute(assistant(*(("echo", {"text": letter}) for letter in "abcd")))
    assert [message["content"] for message in messages] == ["a", "b", "c", "d"]
    assert echo.peak == 4
    assert len(echo.lives) == 1


async def test_limits_of_a_turn_and_of_an_episode() -> None:
    limits = ToolLimits(calls_per_turn=2, calls_per_episode=5)
    async with Toolbox([Echo()], limits).open(EPISODE) as tools:
        turn = assistant(*(("echo", {"text": letter}) for letter in "abc"))
        first = [message["content"] for message in await tools.execute(turn)]
        assert first == ["a", "b", "Error: not executed: at most 2 tool calls at a time"]
        second = [message["content"] for message in await tools.execute(turn)]
        assert second == ["a", "b", "Error: not executed: all 5 tool calls are used"]
        assert tools.count_faults() == {Fault.TURN_LIMIT: 1, Fault.EPISODE_LIMIT: 1}


async def test_long_result_is_cut() -> None:
    record = await call_one(Echo(), {"text": "é", "times": 9000}, ToolLimits(result_bytes=1000))
    assert len(record.result.text.encode()) <= 1000
    assert "bytes cut" in record.result.text


async def test_each_episode_has_a_state_and_rewards() -> None:
    echo = Echo()
    toolbox = Toolbox([echo])
    async with toolbox.open(EpisodeContext("one")) as one, toolbox.open(EpisodeContext("two")) as two:
        await one.execute(assistant(("echo", {"text": "a"}), ("echo", {"text": "bug"})))
        assert await one.rewards() == {"echo": 2 + 0.25}
        assert await two.rewards() == {}, "a tool that was not called has no reward"
        assert [life.episode for life in echo.lives] == ["one"]
    assert echo.lives[0].events == ["a", "bug", "released"]


async def test_release_that_fails_does_not_hide_the_episode() -> None:
    class Leaking(Echo):
        async def release(self, state: Life) -> None:
            raise ValueError("still in use")

    assert (await call_one(Leaking(), {"text": "a"})).result.text == "a"


async def test_arguments_may_be_an_object_and_messages_without_calls_have_no_answer() -> None:
    async with Toolbox([Echo()]).open(EPISODE) as tools:
        message = assistant(("echo", {}))
        message["tool_calls"][0]["function"]["arguments"] = {"text": "a"}
        assert [answer["content"] for answer in await tools.execute(message)] == ["a"]
        assert await tools.execute({"role": "assistant", "content": "done"}) == []
        with pytest.raises(ValidationError):
            await tools.execute({"role": "user", "content": "hello"})


def test_schemas_are_those_of_a_chat_request() -> None:
    assert Toolbox([Echo()]).schemas() == [
        {
            "type": "function",
            "function": {"name": "echo", "description": "Repeat a text.", "parameters": Echo.parameters},
        }
    ]
    with pytest.raises(ValueError, match="same name"):
        Toolbox([Echo(), Echo()])
