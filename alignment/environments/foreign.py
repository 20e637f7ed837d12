"""Environments of others, unchanged, in processes of their own: `textarena:GuessTheNumber-v0?max_number=50`.

What is after the `?` are keyword arguments, as in a query of a URL; each is JSON, or else a text.
"""

import asyncio
import hashlib
from collections.abc import Iterator
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import cast
from urllib.parse import parse_qsl
from uuid import uuid4

from pydantic import BaseModel, FiniteFloat, JsonValue, TypeAdapter, ValidationError

from alignment.environments.episode_loop import LoopEnvironment, limit_reward
from alignment.environments.errors import InfrastructureFailure
from alignment.environments.host_pool import EnvironmentSpec, HostPool, PooledProcess
from alignment.environments.host_process import ADAPTERS, HostConfig
from alignment.environments.protocols import (
    Agent,
    Environment,
    Message,
    Observation,
    Outcome,
    Reason,
    Step,
    StepReward,
    Steps,
    Task,
)
from alignment.environments.tools.base import JsonObject, ToolSchema
from alignment.environments.typed_answers import Model, read_answer
from alignment.environments.worlds import LOWEST_REWARD, StepsWorld
from alignment.errors import UnavailableEnvironment

TASKS_AT_A_TIME = 100
RUN_SECONDS = 60.0  # beyond the deadline, in which an environment can notice it and score the attempt
SEED_BITS = 31
JSON_VALUE: TypeAdapter[JsonValue] = TypeAdapter(JsonValue)
ROW: TypeAdapter[JsonObject] = TypeAdapter(JsonObject)


@dataclass(frozen=True)
class Package:
    """What a scheme runs: a file of host_adapters.

    Attributes:
        has_loop: It has a loop and tasks of its own.
        limits_reward: Its outcomes, which others have scaled, are limited to -1 and 1, as rewards of steps always are.
    """

    adapter: str
    has_loop: bool = False
    limits_reward: bool = False


PACKAGES = {
    "gymnasium": Package("gymnasium_adapter.py"),
    "python": Package("python_adapter.py", has_loop=True),
    "reasoning_gym": Package("reasoning_gym_adapter.py"),
    "textarena": Package("textarena_adapter.py"),
    "verifiers": Package("verifiers_adapter.py", has_loop=True, limits_reward=True),
    "verifiers.v1": Package("verifiers_v1_adapter.py", has_loop=True, limits_reward=True),
}


class TaskAnswer(BaseModel):
    id: str
    data: dict[str, JsonValue] = {}
    seed: int = 0


class TasksAnswer(BaseModel):
    tasks: list[TaskAnswer]


class ObservationAnswer(BaseModel):
    messages: list[dict[str, JsonValue]]
    tools: list[dict[str, JsonValue]] = []
    state_key: str | None = None
    unfinished_reward: FiniteFloat = LOWEST_REWARD


class StepAnswer(BaseModel):
    messages: list[dict[str, JsonValue]] = []
    reward: FiniteFloat = 0.0
    terminated: bool = False
    truncated: bool = False
    info: dict[str, JsonValue] = {}
    state_key: str | None = None


class StepRewardAnswer(BaseModel):
    completion_id: str
    reward: FiniteFloat


class OutcomeAnswer(BaseModel):
    reward: FiniteFloat | None
    step_rewards: list[StepRewardAnswer] = []
    metrics: dict[str, float] = {}
    reason: Reason = "completed"


def parse_name(text: str) -> tuple[str, JsonObject]:
    """Return a name and its arguments.

    Example: parse_name("FrozenLake-v1?is_slippery=false&map_name=8x8") is
             ("FrozenLake-v1", {"is_slippery": False, "map_name": "8x8"})
    """
    name, _, query = text.partition("?")
    return name, {key: _parse_value(value) for key, value in parse_qsl(query, keep_blank_values=True)}


def _parse_value(text: str) -> JsonValue:
    try:
        return JSON_VALUE.validate_json(text)
    except ValidationError:
        return text


def open_foreign(scheme: str, rest: str, arguments: JsonObject, config: HostConfig | None) -> Environment:
    """Return the environment of a scheme of PACKAGES. Its process is started later, when it is needed."""
    if config is None:
        raise UnavailableEnvironment(
            f"{scheme}: needs the interpreter that has the package, as in --python venv/bin/python"
        )
    package = PACKAGES[scheme]
    name, named = parse_name(rest)
    spec = EnvironmentSpec(ADAPTERS / package.adapter, name, named | arguments, f"{scheme}:{name}")
    pool = HostPool(spec, config)
    return ForeignEnvironment(pool, package.limits_reward) if package.has_loop else ForeignLoop(pool)


def seeded_tasks(split: str, seed: int) -> Iterator[Task]:
    """Yield tasks without end, of which each has a seed of its own. Splits have none in common but by chance."""
    number = 0
    while True:
        digest = hashlib.sha256(f"{split}/{seed}/{number}".encode()).digest()
        task_seed = int.from_bytes(digest[:4], "big") >> (32 - SEED_BITS)
        yield Task(f"{split}-{seed}-{number}", {}, task_seed)
        number += 1


def row_tasks(path: Path, seed: int) -> Iterator[Task]:
    """Yield the rows of a file of JSON lines, in its order. Raises UnavailableEnvironment if it has others."""
    try:
        with path.open() as lines:
            for number, line in enumerate(lines):
                yield Task(f"{path.stem}-{number}", ROW.validate_json(line), seed)
    except (OSError, ValidationError) as error:
        raise UnavailableEnvironment(f"{path} has no rows of JSON objects: {error}") from error


class ForeignSteps(Steps):
    """One attempt in a world of a process."""

    def __init__(self, pool: HostPool, episode_id: str) -> None:
        self._pool = pool
        self._episode_id = episode_id
        self._stack = AsyncExitStack()
        self._pooled: PooledProcess | None = None
        self._unfinished_reward = LOWEST_REWARD

    def tasks(self, split: str, seed: int) -> Iterator[Task]:
        return seeded_tasks(split, seed)

    async def reset(self, task: Task) -> Observation:
        """Begin the task. A process that dies meanwhile, perhaps by another attempt, is replaced once."""
        self._pooled = await self._stack.enter_async_context(self._pool.use())
        try:
            answer = await self._call("reset", {"task": _task_on_wire(task)})
        except InfrastructureFailure:
            if self._pooled.process.is_alive:
                raise
            await self._stack.aclose()
            self._pooled = await self._stack.enter_async_context(self._pool.use())
            answer = await self._call("reset", {"task": _task_on_wire(task)})
        observation = self._read(ObservationAnswer, answer)
        self._unfinished_reward = observation.unfinished_reward
        tools = cast("list[ToolSchema]", observation.tools)
        return Observation(observation.messages, tools, state_key=observation.state_key)

    async def step(self, reply: Message) -> Step:
        answer = self._read(StepAnswer, await self._call("step", {"reply": dict(reply)}))
        reward = limit_reward(answer.reward)
        return Step(answer.messages, reward, answer.terminated, answer.truncated, answer.info, answer.state_key)

    def unfinished_reward(self) -> float:
        return self._unfinished_reward

    async def close(self) -> None:
        async with self._stack:
            if self._pooled is not None and self._pooled.process.is_alive:
                await self._call("close", {})

    async def _call(self, method: str, params: JsonObject) -> JsonValue:
        assert self._pooled is not None, "reset comes first"
        seconds = self._pool.config.answer_seconds
        return await self._pooled.process.call(method, {"episode": self._episode_id, **params}, seconds)

    def _read(self, model: type[Model], answer: JsonValue) -> Model:
        return read_answer(model, answer, self._pool.spec.label)


class ForeignLoop(LoopEnvironment):
    """An environment of worlds in other processes, whose loop is ours."""

    def __init__(self, pool: HostPool) -> None:
        super().__init__(lambda: StepsWorld(ForeignSteps(pool, uuid4().hex)))
        self._pool = pool

    async def max_concurrency(self) -> int:
        return await self._pool.count_places()

    async def close(self) -> None:
        await super().close()
        await self._pool.close()


class ForeignEnvironment(Environment):
    """An environment in other processes that has a loop of its own."""

    def __init__(self, pool: HostPool, limits_reward: bool) -> None:
        self._pool = pool
        self._limits_reward = limits_reward

    def tasks(self, split: str, seed: int) -> Iterator[Task]:
        """Yield the tasks, which a process of its own lists. It ends with the iterator."""
        process = self._pool.open_blocking()
        seconds = self._pool.config.answer_seconds
        start, count = 0, TASKS_AT_A_TIME
        try:
            while True:
                params: JsonObject = {"split": split, "seed": seed, "start": start, "count": count}
                answer = process.call_blocking("tasks", params, seconds)
                tasks = read_answer(TasksAnswer, {"tasks": answer}, self._pool.spec.label).tasks
                if not tasks:
                    return
                yield from (Task(task.id, task.data, task.seed) for task in tasks)
                start += len(tasks)
                count = len(tasks)  # as many as a line has had place for
        finally:
            process.close()

    async def run(self, task: Task, agent: Agent) -> Outcome:
        async with self._pool.use() as pooled:
            params: JsonObject = {"episode": uuid4().hex, "task": _task_on_wire(task), "agent": _agent_on_wire(agent)}
            seconds = agent.limits.deadline_seconds + RUN_SECONDS
            try:
                answer = await pooled.process.call("run", params, seconds, can_cancel=pooled.opened.is_concurrent)
            except asyncio.CancelledError:
                if not pooled.opened.is_concurrent:
                    pooled.process.kill("was stopped with its attempt")
                raise
        outcome = read_answer(OutcomeAnswer, answer, self._pool.spec.label)
        step_rewards = [StepReward(step.completion_id, step.reward) for step in outcome.step_rewards]
        reward = outcome.reward
        if reward is not None and self._limits_reward:
            reward = limit_reward(reward)
        return Outcome(reward, step_rewards, outcome.metrics, outcome.reason)

    async def max_concurrency(self) -> int:
        return await self._pool.count_places()

    async def close(self) -> None:
        await self._pool.close()


def _task_on_wire(task: Task) -> JsonObject:
    return {"id": task.id, "data": dict(task.data), "seed": task.seed}


def _agent_on_wire(agent: Agent) -> JsonObject:
    fields: JsonObject = asdict(agent) | {"headers": dict(agent.headers)}
    return fields
