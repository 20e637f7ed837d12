"""Environments of others: worlds and functions in processes of another interpreter, written as files for the tests."""

import asyncio
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from itertools import islice
from pathlib import Path
from textwrap import dedent

import pytest
from pydantic import JsonValue

from alignment.environments import foreign, host_process
from alignment.environments.episode_loop import limit_reward
from alignment.environments.errors import AgentFailure, InfrastructureFailure
from alignment.environments.foreign import (
    ForeignEnvironment,
    ForeignSteps,
    OutcomeAnswer,
    StepAnswer,
    parse_name,
    seeded_tasks,
)
from alignment.environments.host_pool import EnvironmentSpec, HostPool
from alignment.environments.host_process import HostConfig
from alignment.environments.open_environment import environment_names, open_environment
from alignment.environments.protocols import Agent, Environment, HasPlaces, Limits, Outcome, StepReward, Task
from alignment.environments.typed_answers import read_answer
from alignment.errors import UnavailableEnvironment

TASK = Task("train-0", {"room": 3}, seed=7)
AGENT = Agent("http://127.0.0.1:9/v1", "sk-ep-1", "shop", {"x-lane": "a"}, "ep-1")
WORLD = """
import os, time

class World:
    def __init__(self):
        self.rooms = {}

    def reset(self, episode, task):
        self.rooms[episode] = task["data"]["room"]
        if os.path.exists("die"):
            os._exit(1)
        return {"messages": [{"role": "user", "content": f"{os.getpid()}"}], "state_key": "first",
                "unfinished_reward": task["data"].get("unfinished", -1.0)}

    def step(self, episode, reply):
        self.rooms[episode] += 1
        if reply["content"] == "die":
            os._exit(1)
        if reply["content"] == "wrong":
            return {"reward": "much"}
        if reply["content"] in ("3", "-3"):
            return {"reward": int(reply["content"]), "terminated": True}
        room = self.rooms[episode]
        return {"messages": [{"role": "user", "content": f"room {room}"}], "reward": 0.25, "terminated": room == 5,
                "info": {"rooms": len(self.rooms)}}

    def close(self, episode):
        del self.rooms[episode]

def open_environment(name, arguments):
    return World()
"""


@pytest.fixture
async def opened(tmp_path: Path) -> AsyncIterator[Callable[..., Environment]]:
    """Open a function of a module with this source, and close it after the test."""
    environments: list[Environment] = []

    def open_function(source: str, name: str = "game:play", **options: object) -> Environment:
        (tmp_path / "game.py").write_text(dedent(source))
        config = HostConfig(python=Path(sys.executable), paths=(tmp_path,), **options)  # type: ignore[arg-type]
        environments.append(open_environment(f"python:{name}", host=config))
        return environments[-1]

    yield open_function
    for environment in environments:
        await environment.close()


@pytest.fixture
async def pool(tmp_path: Path) -> AsyncIterator[HostPool]:
    pool = world_pool(tmp_path)
    yield pool
    await pool.close()


def world_pool(folder: Path, **options: object) -> HostPool:
    adapter = folder / "world.py"
    adapter.write_text(WORLD)
    config = HostConfig(python=Path(sys.executable), **options)  # type: ignore[arg-type]
    return HostPool(EnvironmentSpec(adapter, "rooms", {}, "test:rooms"), config)


async def start(pool: HostPool, name: str) -> tuple[ForeignSteps, str]:
    """Begin an attempt. Returns it, and the number of its process."""
    steps = ForeignSteps(pool, name)
    observation = await steps.reset(TASK)
    return steps, str(observation.messages[0]["content"])


@pytest.mark.parametrize(
    ("text", "name", "arguments"),
    [
        ("Game-v0", "Game-v0", {}),
        ("Game-v0?min=1&max=20", "Game-v0", {"min": 1, "max": 20}),
        (
            'a?b=false&c=null&d=[1,2]&e=0.5&f={"g":1}',
            "a",
            {"b": False, "c": None, "d": [1, 2], "e": 0.5, "f": {"g": 1}},
        ),
        ('a?b=8x8&c="1"&d=&e=a%20b', "a", {"b": "8x8", "c": "1", "d": "", "e": "a b"}),
    ],
)
def test_arguments_of_a_name_are_json(text: str, name: str, arguments: dict[str, object]) -> None:
    assert parse_name(text) == (name, arguments)


def test_tasks_of_splits_and_seeds_are_repeatable_and_differ() -> None:
    first = list(islice(seeded_tasks("train", 0), 100))
    assert first == list(islice(seeded_tasks("train", 0), 100))
    others = [task for key in (("test", 0), ("train", 1)) for task in islice(seeded_tasks(*key), 100)]
    assert len({task.seed for task in first + others}) == len({task.id for task in first + others}) == 300


def test_scheme_needs_an_interpreter() -> None:
    assert {"gymnasium:", "python:", "reasoning_gym:", "textarena:", "verifiers:"} <= set(environment_names())
    with pytest.raises(UnavailableEnvironment, match=r"textarena: needs the interpreter that has the package"):
        open_environment("textarena:Game-v0")


async def test_attempts_share_a_process_and_no_state(pool: HostPool) -> None:
    one, pid = await start(pool, "one")
    two, other_pid = await start(pool, "two")
    assert pid == other_pid
    reply = {"role": "assistant", "content": "go"}
    step = await one.step(reply)
    assert (step.messages, step.reward, step.terminated) == ([{"role": "user", "content": "room 4"}], 0.25, False)
    assert (await one.step(reply)).terminated
    assert (await two.step(reply)).info == {"rooms": 2}
    await one.close()
    assert (await two.step(reply)).info == {"rooms": 1}
    await two.close()


@pytest.mark.parametrize(("data", "reward"), [({}, -1.0), ({"unfinished": 0.0}, 0.0)])
async def test_world_says_what_an_unfinished_attempt_is_worth(
    pool: HostPool, data: dict[str, float], reward: float
) -> None:
    steps = ForeignSteps(pool, "one")
    await steps.reset(replace(TASK, data={"room": 3, **data}))
    assert steps.unfinished_reward() == reward
    await steps.close()


async def test_processes_are_used_evenly_and_places_are_waited_for(tmp_path: Path) -> None:
    pool = world_pool(tmp_path, processes=2, episodes_per_process=1)
    one, pid = await start(pool, "one")
    two, other_pid = await start(pool, "two")
    assert pid != other_pid
    waiting = asyncio.create_task(start(pool, "three"))
    await asyncio.sleep(0.1)
    assert not waiting.done()
    await two.close()
    three, third_pid = await waiting
    assert third_pid == other_pid
    await asyncio.gather(one.close(), three.close())
    await pool.close()


async def test_places_are_those_of_all_processes(tmp_path: Path, opened: Callable[..., Environment]) -> None:
    pool = world_pool(tmp_path, processes=2, episodes_per_process=3)
    assert await pool.count_places() == 6
    await pool.close()
    blocking = opened(BLOCKING, processes=2)
    assert isinstance(blocking, HasPlaces) and await blocking.max_concurrency() == 2


async def test_attempts_in_a_process_that_dies_fail_and_the_next_has_another(pool: HostPool) -> None:
    one, pid = await start(pool, "one")
    two, _ = await start(pool, "two")
    for steps, text in ((one, "die"), (two, "go")):
        with pytest.raises(InfrastructureFailure, match="test:rooms ended with exit status 1"):
            await steps.step({"role": "assistant", "content": text})
        await steps.close()
    three, other_pid = await start(pool, "three")
    assert other_pid != pid
    await three.close()


async def test_process_that_dies_in_a_reset_is_replaced_once(pool: HostPool) -> None:
    one, pid = await start(pool, "one")
    (pool._processes[0].process._folder / "die").touch()
    two, other_pid = await start(pool, "two")
    assert other_pid != pid
    await one.close()
    await two.close()


async def test_process_that_dies_in_each_reset_is_a_failure_of_the_host(tmp_path: Path) -> None:
    adapter = tmp_path / "world.py"
    adapter.write_text(WORLD.replace('os.path.exists("die")', "True"))
    pool = HostPool(EnvironmentSpec(adapter, "rooms", {}, "test:rooms"), HostConfig(python=Path(sys.executable)))
    steps = ForeignSteps(pool, "one")
    with pytest.raises(InfrastructureFailure, match="ended with exit status 1"):
        await steps.reset(TASK)
    await steps.close()
    await pool.close()


async def test_process_that_dies_while_opening_is_started_twice(tmp_path: Path) -> None:
    adapter = tmp_path / "world.py"
    adapter.write_text(f"import os\nopen({str(tmp_path / 'log')!r}, 'a').write('.')\nos._exit(1)")
    pool = HostPool(EnvironmentSpec(adapter, "rooms", {}, "test:rooms"), HostConfig(python=Path(sys.executable)))
    with pytest.raises(InfrastructureFailure):
        await ForeignSteps(pool, "one").reset(TASK)
    assert (tmp_path / "log").read_text() == ".."


async def test_answer_of_a_wrong_type_names_the_field(pool: HostPool) -> None:
    steps, _ = await start(pool, "one")
    with pytest.raises(InfrastructureFailure, match="test:rooms has answered with a wrong reward"):
        await steps.step({"role": "assistant", "content": "wrong"})
    await steps.close()


async def test_rewards_of_steps_are_limited(pool: HostPool) -> None:
    steps, _ = await start(pool, "one")
    for text, reward in (("3", 1.0), ("-3", -1.0)):
        assert (await steps.step({"role": "assistant", "content": text})).reward == reward
    await steps.close()


@pytest.mark.parametrize("reward", [float("nan"), float("inf"), float("-inf")])
def test_reward_that_is_no_number_is_no_outcome(reward: float) -> None:
    """`max(-1.0, min(1.0, nan))` is 1."""
    with pytest.raises(ValueError, match="a reward must be a number"):
        limit_reward(reward)
    answer: JsonValue = {"reward": reward}
    for model in (StepAnswer, OutcomeAnswer):
        with pytest.raises(InfrastructureFailure, match="a wrong reward"):
            read_answer(model, answer, "test:rooms")


PLAY = """
    import asyncio, os

    class AgentFailure(Exception):
        pass

    num_running = 0

    async def play(task, agent, most=1):
        global num_running
        num_running += 1
        if task.id == "hang":
            await asyncio.sleep(600)
        if task.id == "gives up":
            raise AgentFailure("no more")
        if task.id == "raises":
            raise KeyError("board")
        if task.id == "stubborn":
            import time; time.sleep(600)
        while num_running < most:
            await asyncio.sleep(0.01)
        return {"reward": 0.5, "metrics": {"pid": os.getpid(), "seed": task.seed, "room": task.data["room"]},
                "reason": "max_turns", "step_rewards": [{"completion_id": agent.headers["x-lane"], "reward": 0.25}]}
"""


async def test_coroutine_function_plays_many_attempts_in_a_process(opened: Callable[..., Environment]) -> None:
    environment = opened(PLAY, "game:play?most=3")
    outcomes = await asyncio.gather(*(environment.run(replace(TASK, seed=seed), AGENT) for seed in range(3)))
    assert [outcome.metrics["seed"] for outcome in outcomes] == [0, 1, 2]
    assert len({outcome.metrics["pid"] for outcome in outcomes}) == 1
    metrics = outcomes[0].metrics
    assert outcomes[0] == Outcome(0.5, [StepReward("a", 0.25)], metrics, "max_turns") and metrics["room"] == 3


async def test_failures_of_a_function(opened: Callable[..., Environment]) -> None:
    environment = opened(PLAY)
    with pytest.raises(AgentFailure, match="python:game:play: AgentFailure: no more"):
        await environment.run(replace(TASK, id="gives up"), AGENT)
    with pytest.raises(InfrastructureFailure, match="KeyError: 'board'"):
        await environment.run(replace(TASK, id="raises"), AGENT)


async def test_attempt_that_is_stopped_ends_alone(opened: Callable[..., Environment]) -> None:
    environment = opened(PLAY)
    first = await environment.run(TASK, AGENT)
    attempt = asyncio.create_task(environment.run(replace(TASK, id="hang"), AGENT))
    await asyncio.sleep(0.1)
    attempt.cancel()
    await asyncio.wait([attempt])
    assert (await environment.run(TASK, AGENT)).metrics["pid"] == first.metrics["pid"]


async def test_attempt_beyond_its_deadline_ends_alone_if_it_can(
    opened: Callable[..., Environment], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(foreign, "RUN_SECONDS", 0.1)
    monkeypatch.setattr(host_process, "CANCEL_SECONDS", 60.0)
    agent = replace(AGENT, limits=Limits(deadline_seconds=0.1))
    environment = opened(PLAY)
    first = await environment.run(TASK, AGENT)
    with pytest.raises(InfrastructureFailure, match="python:game:play had no answer to 'run' within"):
        await environment.run(replace(TASK, id="hang"), agent)
    assert (await environment.run(TASK, AGENT)).metrics["pid"] == first.metrics["pid"]
    monkeypatch.setattr(host_process, "CANCEL_SECONDS", 0.2)
    with pytest.raises(InfrastructureFailure, match="the process of python:game:play had no answer"):
        await environment.run(replace(TASK, id="stubborn"), agent)
    assert (await environment.run(TASK, AGENT)).metrics["pid"] != first.metrics["pid"]


BLOCKING = """
    import os, time

    def play(task, agent):
        if task.id == "hang":
            time.sleep(600)
        assert os.environ["OPENAI_BASE_URL"] == agent.base_url and os.environ["OPENAI_API_KEY"] == agent.api_key
        print("thinking")
        return 1 if task.seed else None

    def tasks(split, seed):
        yield {"word": split}
        yield {"id": "named", "seed": seed, "data": {}}
        for number in range(300):
            yield {"number": number}
"""


async def test_function_has_its_process_alone_and_the_keys_in_its_variables(
    opened: Callable[..., Environment],
) -> None:
    environment = opened(BLOCKING)
    assert isinstance(environment, ForeignEnvironment)
    agents = [replace(AGENT, api_key=f"sk-ep-{number}") for number in range(3)]
    outcomes = await asyncio.gather(*(environment.run(TASK, agent) for agent in agents))
    outcomes.append(await environment.run(replace(TASK, seed=0), AGENT))
    assert [outcome.reward for outcome in outcomes] == [1.0, 1.0, 1.0, None]


async def test_function_that_is_stopped_ends_with_its_process(opened: Callable[..., Environment]) -> None:
    environment = opened(BLOCKING)
    attempt = asyncio.create_task(environment.run(replace(TASK, id="hang"), AGENT))
    await asyncio.sleep(0.3)
    attempt.cancel()
    await asyncio.wait([attempt])
    assert (await environment.run(TASK, AGENT)).reward == 1.0


def test_tasks_of_a_module_come_in_order(opened: Callable[..., Environment]) -> None:
    environment = opened(BLOCKING)
    tasks = list(environment.tasks("test", 5))
    assert tasks[:3] == [Task("test-0", {"word": "test"}), Task("named", {}, 5), Task("test-2", {"number": 0})]
    assert [task.data["number"] for task in tasks[2:]] == list(range(300))
    assert list(islice(environment.tasks("test", 5), 150)) == tasks[:150]


LONG = """
    def play(task, agent):
        return 1

    def tasks(split, seed):
        for number in range(250):
            yield {"number": number, "text": "\u00e9" * (20_000 if number < 120 else 1)}
"""


def test_long_tasks_come_in_smaller_pages(opened: Callable[..., Environment]) -> None:
    tasks = list(opened(LONG).tasks("test", 5))
    assert [task.data["number"] for task in tasks] == list(range(250))
    with pytest.raises(InfrastructureFailure, match="its answer has more than 10000 bytes"):
        list(opened(LONG, line_bytes=10_000).tasks("test", 5))


@pytest.mark.parametrize(
    ("name", "message"),
    [("nothing:play", "No module named 'nothing'"), ("game:other", "no attribute 'other'")],
)
async def test_function_that_does_not_exist_is_the_users_mistake(
    opened: Callable[..., Environment], name: str, message: str
) -> None:
    with pytest.raises(UnavailableEnvironment, match=message):
        await opened(PLAY, name).run(TASK, AGENT)
