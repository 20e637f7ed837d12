"""Our loop with the real API and a scripted engine: the same samples as other clients' loops, tools, and failures."""

import json
import subprocess
from collections.abc import Sequence
from dataclasses import replace

import openai
import pytest

from alignment.environments.episode_loop import LoopEnvironment
from alignment.environments.protocols import Feedback, Limits, Message, Observation, Step, Task
from alignment.environments.tools.base import EpisodeContext, JsonObject, Tool, ToolResult
from alignment.environments.tools.toolbox import Toolbox
from alignment.environments.worlds import InteractionWorld, StepsWorld
from app.models import Episode, Turn
from examples.arithmetic_tutor import ArithmeticTutor
from tests.support import episodes
from tests.support.deployment import Harness
from tests.support.environments import PLAN, Endless, Rooms, open_run, user
from tests.support.scripted_engine import ScriptedEngine

Sample = tuple[list[int], list[int] | None, list[float] | None, str | None]


async def samples(harness: Harness, episode_id: str) -> list[Sample]:
    """Return prompt, reply, log-probs and parent's step of each turn of an episode."""
    turns = [turn for turn in await harness.all(Turn) if turn.episode_id == episode_id]
    steps = {turn.id: str(turn.episode_step) for turn in turns}
    turns.sort(key=lambda turn: turn.episode_step)
    return [
        (await harness.prompt_ids(turn.id), turn.output_ids, turn.logprobs, steps.get(turn.parent_id or ""))
        for turn in turns
    ]


async def play_with_openai(base_url: str, key: str, messages: list[Message]) -> None:
    async with openai.AsyncOpenAI(base_url=base_url, api_key=key) as client:
        for room in (1, 2, 3):
            reply = await client.chat.completions.create(model="shop", messages=list(messages))  # type: ignore[arg-type]
            messages += [reply.choices[0].message.model_dump(exclude_none=True), user(f"You are in room {room}.")]


def play_with_curl(base_url: str, key: str, messages: list[Message]) -> None:
    for room in (1, 2, 3):
        body = json.dumps({"model": "shop", "messages": messages})
        header = f"Authorization: Bearer {key}"
        command = ["curl", "-sf", "--noproxy", "*", f"{base_url}/chat/completions", "-H", header, "-d", body]
        message = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)["choices"][0]["message"]
        messages += [{"role": "assistant", "content": message["content"]}, user(f"You are in room {room}.")]


async def test_same_samples_as_with_other_clients(harness: Harness, live_url: str, scripted: ScriptedEngine) -> None:
    async with open_run(LoopEnvironment(lambda: StepsWorld(Rooms())), live_url, harness.key) as run:
        await run.run()
    [ours] = await harness.all(Episode)
    first = user("Task train-0: you are in room 0.")
    others = [await episodes.create(harness, sampling="policy") for _ in range(2)]
    urls = [f"{live_url}/v1/episodes/{other['id']}" for other in others]
    await play_with_openai(urls[0], others[0]["api_key"], [first])
    play_with_curl(urls[1], others[1]["api_key"], [first])
    expected = await samples(harness, ours.id)
    assert [parent for *_, parent in expected] == [None, "1", "2"]
    assert await samples(harness, others[0]["id"]) == expected
    assert await samples(harness, others[1]["id"]) == expected


SCHEMA: JsonObject = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}


class Calculator(Tool[None]):
    name = "add"
    description = "Add two numbers."
    parameters = SCHEMA

    async def create(self, episode: EpisodeContext) -> None:
        assert episode.id.startswith("ep-") and episode.task["number"] == 0

    async def execute(self, state: None, arguments: JsonObject) -> ToolResult:
        return ToolResult(str(int(str(arguments["a"])) + int(str(arguments["b"]))), reward=0.125)

    async def reward(self, state: None) -> float:
        return 0.25


class Sums(Rooms):
    async def reset(self, task: Task) -> Observation:
        return Observation([user("What is 2 + 3?")], toolbox=Toolbox([Calculator()]))

    async def step(self, reply: Message) -> Step:
        assert "tool_calls" not in reply, "calls of the toolbox are executed by the loop"
        return Step(reward=0.5, terminated=True)


async def test_toolbox_is_executed_by_the_loop(harness: Harness, live_url: str, scripted: ScriptedEngine) -> None:
    scripted.tool_call, scripted.answers_results = ("add", '{"a": 2, "b": 3}'), True
    async with open_run(LoopEnvironment(lambda: StepsWorld(Sums())), live_url, harness.key) as run:
        summary = await run.run()
    assert scripted.requests[0]["tools"][0]["function"]["name"] == "add"
    assert scripted.requests[1]["messages"][-1]["content"] == "5"
    [episode] = await harness.all(Episode)
    assert episode.outcome == 0.75, "the step's reward and the tool's for the attempt"
    assert summary.mean_reward == 0.875, "with that of the call"
    assert summary.metrics == {"tool_calls": 1.0, "tool_faults": 0.0}


class OwnTools(Rooms):
    async def reset(self, task: Task) -> Observation:
        return Observation([user("Move.")], tools=[Calculator().schema()])

    async def step(self, reply: Message) -> Step:
        calls = reply["tool_calls"]
        assert isinstance(calls, list) and isinstance(calls[0], dict)
        return Step([{"role": "tool", "tool_call_id": calls[0]["id"], "content": "moved"}], 0.5, truncated=True)


async def test_tools_of_the_environment_itself(harness: Harness, live_url: str, scripted: ScriptedEngine) -> None:
    scripted.tool_call = ("add", "{}")
    async with open_run(LoopEnvironment(lambda: StepsWorld(OwnTools())), live_url, harness.key) as run:
        await run.run()
    [episode] = await harness.all(Episode)
    assert (episode.end_reason, episode.outcome) == ("max_turns", 0.5)


class Mute(Endless):
    async def respond(self, messages: Sequence[Message]) -> Feedback:
        raise RuntimeError("the tutor is ill")


@pytest.mark.usefixtures("scripted")
async def test_world_that_raises_has_failed_and_is_closed(harness: Harness, live_url: str) -> None:
    closed: list[str] = []

    class Closing(Mute):
        async def finish(self) -> None:
            closed.append("finished")
            raise OSError("cannot be closed either")

    async with open_run(LoopEnvironment(lambda: InteractionWorld(Closing())), live_url, harness.key) as run:
        summary = await run.run()
    assert summary.ends == {"infrastructure": 2} and closed == ["finished", "finished"]
    assert summary.errors == {"RuntimeError: the tutor is ill": 2}


async def test_tutor_says_try_again(harness: Harness, live_url: str, scripted: ScriptedEngine) -> None:
    scripted.reply_text = "I think it is 7"
    tutor = LoopEnvironment(lambda: InteractionWorld(ArithmeticTutor(largest=0)))
    async with open_run(tutor, live_url, harness.key) as run:
        summary = await run.run()
    assert summary.mean_reward == -1.0 and summary.num_turns == 5
    contents = [message["content"] for message in scripted.requests[-1]["messages"]]
    assert contents[0] == "What is 0 + 0? End with the number."
    assert contents[2] == "That is not right. Try again."
    scripted.reply_text = "Then it is 0."
    async with open_run(tutor, live_url, harness.key, replace(PLAN, name="again")) as run:
        summary = await run.run()
    assert summary.mean_reward == 1.0 and summary.num_turns == 1


async def test_limit_of_a_reply_is_sent(harness: Harness, live_url: str, scripted: ScriptedEngine) -> None:
    plan = replace(PLAN, limits=Limits(max_reply_tokens=3))
    async with open_run(LoopEnvironment(lambda: StepsWorld(Rooms())), live_url, harness.key, plan) as run:
        await run.run()
    assert {request["max_tokens"] for request in scripted.requests} == {3}
