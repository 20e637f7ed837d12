"""The same environment gives the same samples, token by token, with our loop, LangGraph, OpenAI's client and curl."""

import asyncio
import json
import shutil
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import openai
import pytest
from langchain_core.messages import AnyMessage, HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, MessagesState, StateGraph

from alignment.environments.episode_loop import LoopEnvironment
from alignment.environments.protocols import Message, Observation, Step, Steps, Task
from alignment.environments.tools.base import ToolSchema
from alignment.environments.worlds import StepsWorld
from app.chat.histories import read_prompt_ids
from app.models import Sample, Turn
from tests.support import episodes
from tests.support.deployment import Harness
from tests.support.environments import numbered_tasks, open_run
from tests.support.scripted_engine import ScriptedEngine
from workers.curate import curate

SYSTEM = "You know the weather."
QUESTION = "Is it warm in Lagos?"
WEATHER = json.dumps({"city": "Lagos", "celsius": 31})
OUTCOME = 0.5
PARAMETERS: dict[str, Any] = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL: ToolSchema = {
    "type": "function",
    "function": {"name": "weather", "description": "The weather of a city.", "parameters": PARAMETERS},
}
FIRST: list[Message] = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": QUESTION}]


def tool_message(call_id: str) -> Message:
    return {"role": "tool", "tool_call_id": call_id, "content": WEATHER}


class Weather(Steps):
    """One question, whose answer needs the tool."""

    def tasks(self, split: str, seed: int) -> Iterator[Task]:
        return numbered_tasks(split, seed)

    async def reset(self, task: Task) -> Observation:
        return Observation(FIRST, tools=[TOOL])

    async def step(self, reply: Message) -> Step:
        calls: Any = reply.get("tool_calls")
        return Step([tool_message(calls[0]["id"])]) if calls else Step(reward=OUTCOME, terminated=True)


async def play_loop(harness: Harness, live_url: str) -> None:
    async with open_run(LoopEnvironment(lambda: StepsWorld(Weather())), live_url, harness.key) as run:
        await run.run()


Chat = Callable[[str, str], Awaitable[None]]  # with a base URL and a key, until the agent has answered


async def play(harness: Harness, live_url: str, chat: Chat) -> None:
    episode = await episodes.create(harness, sampling="policy")
    await chat(episode["base_url"].replace("http://attune", live_url), episode["api_key"])
    assert (await episodes.end(harness, episode["id"], outcome=OUTCOME)).status_code == 200


async def chat_by_langgraph(base_url: str, key: str) -> None:
    options: Any = {"base_url": base_url, "api_key": key, "max_retries": 0}
    model = ChatOpenAI(model="shop", **options).bind_tools([dict(TOOL)])

    async def answer(state: MessagesState) -> dict[str, list[AnyMessage]]:
        return {"messages": [await model.ainvoke([("system", SYSTEM), *state["messages"]])]}

    def call_tools(state: MessagesState) -> dict[str, list[AnyMessage]]:
        calls: Any = state["messages"][-1]
        return {"messages": [ToolMessage(WEATHER, tool_call_id=call["id"]) for call in calls.tool_calls]}

    def next_node(state: MessagesState) -> str:
        reply: Any = state["messages"][-1]
        return "tools" if reply.tool_calls else END

    graph = StateGraph(MessagesState)
    graph.add_node("answer", answer)
    graph.add_node("tools", call_tools)
    graph.add_edge(START, "answer")
    graph.add_conditional_edges("answer", next_node)
    graph.add_edge("tools", "answer")
    await graph.compile().ainvoke(MessagesState(messages=[HumanMessage(QUESTION)]))


async def chat_by_openai(base_url: str, key: str) -> None:
    """Stream, at temperature 0, and send the reply back as the client's object: as agents do that know no better."""
    messages: list[Any] = [*FIRST]
    tools: Any = [TOOL]
    async with openai.AsyncOpenAI(base_url=base_url, api_key=key, max_retries=0) as client:
        while messages[-1]["role"] != "assistant":
            chat = client.chat.completions.stream(model="shop", messages=messages, tools=tools, temperature=0)
            async with chat as stream:
                reply = (await stream.get_final_completion()).choices[0].message
            messages.append(reply.to_dict())
            messages += [tool_message(call.id) for call in reply.tool_calls or ()]


async def chat_by_curl(base_url: str, key: str) -> None:
    messages: list[Any] = [*FIRST]
    while messages[-1]["role"] != "assistant":
        body = json.dumps({"model": "shop", "messages": messages, "tools": [TOOL]})
        headers = ("-H", f"Authorization: Bearer {key}", "-H", "Content-Type: application/json")
        command = ("curl", "-sS", "--fail-with-body", *headers, "-d", body, f"{base_url}/chat/completions")
        curl = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
        output, _ = await curl.communicate()
        assert curl.returncode == 0, output
        reply = json.loads(output)["choices"][0]["message"]
        messages.append(reply)
        messages += [tool_message(call["id"]) for call in reply.get("tool_calls") or ()]


async def read_samples(harness: Harness) -> list[list[tuple[object, ...]]]:
    """Return what is learned from of each episode, in order: prompt, reply, log-probs and reward of each turn."""
    await curate(harness.db, harness.settings)
    samples = {sample.turn_id: sample for sample in await harness.all(Sample)}
    by_episode: dict[str, list[tuple[object, ...]]] = {}
    async with harness.db.read() as session:
        prompts = await read_prompt_ids(session, list(samples))
    for turn in sorted(await harness.all(Turn), key=lambda turn: (turn.episode_step or 0, turn.id)):
        sample = samples[turn.id]
        row = (prompts[turn.id], turn.output_ids, turn.logprobs, sample.state, sample.reward, turn.prefix_reuse)
        by_episode.setdefault(str(turn.episode_id), []).append(row)
    return list(by_episode.values())


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
async def test_samples_do_not_depend_on_the_client(harness: Harness, scripted: ScriptedEngine, live_url: str) -> None:
    scripted.tool_call, scripted.answers_results = ("weather", '{"city": "Lagos"}'), True
    await play_loop(harness, live_url)
    for chat in (chat_by_langgraph, chat_by_openai, chat_by_curl):
        await play(harness, live_url, chat)
    first, *others = await read_samples(harness)
    assert len(first) == 2 and all(row[4] == OUTCOME for row in first)
    assert others == [first] * 3
