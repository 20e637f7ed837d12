"""Environments of others, unchanged, in processes of their own: `textarena:GuessTheNumber-v0?max_number=50`.

What is after the `?` are keyword arguments, as in a query of a URL; each is JSON, or else a text.
"""

import asyncio
import hashlib
from collections.abc import Iterator
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from typing import TypeVar, cast
from urllib.parse import parse_qsl
from uuid import uuid4

from pydantic import BaseModel, JsonValue, TypeAdapter, ValidationError

from alignment.environments.episode_loop import LoopEnvironment
from alignment.environments.errors import InfrastructureFailure
from alignment.environments.host_pool import ForeignName, HostPool, Place
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
from alignment.environments.worlds import StepsWorld
from alignment.errors import UnavailableEnvironment

TASKS_AT_A_TIME = 100
RUN_SECONDS = 60.0  # beyond the deadline, in which an environment can notice it and score the attempt
SEED_BITS = 31
Model = TypeVar("Model", bound=BaseModel)
JSON_VALUE: TypeAdapter[JsonValue] = TypeAdapter(JsonValue)


@dataclass(frozen=True)
class Package:
    """What a scheme runs: a file of host_adapters. `has_loop`: it has a loop and tasks of its own."""

    adapter: str
    has_loop: bool = False


PACKAGES = {
    "gymnasium": Package("gymnasium_adapter.py"),
    "python": Package("python_adapter.py", has_loop=True),
    "reasoning_gym": Package("reasoning_gym_adapter.py"),
    "textarena": Package("textarena_adapter.py"),
    "verifiers": Package("verifiers_adapter.py", has_loop=True),
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


class StepAnswer(BaseModel):
    messages: list[dict[str, JsonValue]] = []
    reward: float = 0.0
    terminated: bool = False
    truncated: bool = False
    info: dict[str, JsonValue] = {}
    state_key: str | None = None


class StepRewardAnswer(BaseModel):
    completion_id: str
    reward: float


class OutcomeAnswer(BaseModel):
    reward: float | None
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
    foreign = ForeignName(ADAPTERS / package.adapter, name, named | arguments, f"{scheme}:{name}")
    pool = HostPool(foreign, config)
    return ForeignEnvironment(pool) if package.has_loop else ForeignLoop(pool)


def seeded_tasks(split: str, seed: int) -> Iterator[Task]:
    """Yield tasks without end, of which each has a seed of its own. Splits have none in common but by chance."""
    number = 0
    while True:
        digest = hashlib.sha256(f"{split}/{seed}/{number}".encode()).digest()
        task_seed = int.from_bytes(digest[:4], "big") >> (32 - SEED_BITS)
        yield Task(f"{split}-{seed}-{number}", {}, task_seed)
        number += 1


class ForeignSteps(Steps):
    """One attempt in a world of a process."""

    def __init__(self, pool: HostPool, episode_id: str) -> None:
        self._pool = pool
        self._episode_id = episode_id
        self._stack = AsyncExitStack()
        self._place: Place | None = None

    def tasks(self, split: str, seed: int) -> Iterator[Task]:
        return seeded_tasks(split, seed)

    async def reset(self, task: Task) -> Observation:
        """Begin the task. A process that dies meanwhile, perhaps by another attempt, is replaced once."""
        self._place = await self._stack.enter_async_context(self._pool.use())
        try:
            answer = await self._call("reset", {"task": _task_on_wire(task)})
        except InfrastructureFailure:
            if self._place.process.is_alive:
                raise
            await self._stack.aclose()
            self._place = await self._stack.enter_async_context(self._pool.use())
            answer = await self._call("reset", {"task": _task_on_wire(task)})
        observation = self._read(ObservationAnswer, answer)
        tools = cast("list[ToolSchema]", observation.tools)
        return Observation(observation.messages, tools, state_key=observation.state_key)

    async def step(self, reply: Message) -> Step:
        answer = self._read(StepAnswer, await self._call("step", {"reply": dict(reply)}))
        return Step(answer.messages, answer.reward, answer.terminated, answer.truncated, answer.info, answer.state_key)

    async def close(self) -> None:
        async with self._stack:
            if self._place is not None and self._place.process.is_alive:
                await self._call("close", {})

    async def _call(self, method: str, params: JsonObject) -> JsonValue:
        assert self._place is not None, "reset comes first"
        seconds = self._pool.config.answer_seconds
        return await self._place.process.call(method, {"episode": self._episode_id, **params}, seconds)

    def _read(self, model: type[Model], answer: JsonValue) -> Model:
        return read_answer(model, answer, self._pool.name.label)


class ForeignLoop(LoopEnvironment):
    """An environment of worlds in other processes, whose loop is ours."""

    def __init__(self, pool: HostPool) -> None:
        super().__init__(lambda: StepsWorld(ForeignSteps(pool, uuid4().hex)))
        self._pool = pool

    async def close(self) -> None:
        await super().close()
        await self._pool.close()


class ForeignEnvironment(Environment):
    """An environment in other processes that has a loop of its own."""

    def __init__(self, pool: HostPool) -> None:
        self._pool = pool

    def tasks(self, split: str, seed: int) -> Iterator[Task]:
        """Yield the tasks, which a process of its own lists. It ends with the iterator."""
        process = self._pool.open_blocking()
        seconds = self._pool.config.answer_seconds
        start = 0
        try:
            while True:
                params: JsonObject = {"split": split, "seed": seed, "start": start, "count": TASKS_AT_A_TIME}
                answer = process.call_blocking("tasks", params, seconds)
                tasks = read_answer(TasksAnswer, {"tasks": answer}, self._pool.name.label).tasks
                yield from (Task(task.id, task.data, task.seed) for task in tasks)
                if len(tasks) < TASKS_AT_A_TIME:
                    return
                start += len(tasks)
        finally:
            process.close()

    async def run(self, task: Task, agent: Agent) -> Outcome:
        async with self._pool.use() as place:
            params: JsonObject = {"episode": uuid4().hex, "task": _task_on_wire(task), "agent": _agent_on_wire(agent)}
            seconds = agent.limits.deadline_seconds + RUN_SECONDS
            try:
                answer = await place.process.call("run", params, seconds, can_cancel=place.opened.is_concurrent)
            except asyncio.CancelledError:
                if not place.opened.is_concurrent:
                    place.process.kill("was stopped with its attempt")
                raise
        outcome = read_answer(OutcomeAnswer, answer, self._pool.name.label)
        step_rewards = [StepReward(step.completion_id, step.reward) for step in outcome.step_rewards]
        return Outcome(outcome.reward, step_rewards, outcome.metrics, outcome.reason)

    async def close(self) -> None:
        await self._pool.close()


def read_answer(model: type[Model], answer: JsonValue, label: str) -> Model:
    """Return an answer with its types. Raises InfrastructureFailure if it has others."""
    try:
        return model.model_validate(answer)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise InfrastructureFailure(f"{label} has answered with a wrong {where}: {first['msg']}") from error


def _task_on_wire(task: Task) -> JsonObject:
    return {"id": task.id, "data": dict(task.data), "seed": task.seed}


def _agent_on_wire(agent: Agent) -> JsonObject:
    fields: JsonObject = asdict(agent) | {"headers": dict(agent.headers)}
    return fields
