"""Environments for tests: a world of steps, an interaction, one with a loop of its own, and a run of them."""

from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from itertools import count

import httpx2

from alignment.environments.environment_run import EnvironmentRun, RunPlan
from alignment.environments.errors import AgentFailure, InfrastructureFailure
from alignment.environments.protocols import (
    Agent,
    Environment,
    Feedback,
    Interaction,
    Message,
    Observation,
    Outcome,
    Step,
    StepReward,
    Steps,
    Task,
)
from alignment.environments.service_client import ServiceClient
from alignment.environments.service_http import ServiceHttp

PLAN = RunPlan(name="run-1", policy="shop", num_tasks=1, concurrency=4)


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def numbered_tasks(split: str, seed: int) -> Iterator[Task]:
    """Yield tasks without end."""
    return (Task(f"{split}-{number}", {"number": number}, seed) for number in count())


class Rooms(Steps):
    """Three rooms, one a step. The first step is worth 0.25, the way out `outcome`."""

    def __init__(self, outcome: float = 0.5, num_rooms: int = 3) -> None:
        self._outcome = outcome
        self._num_rooms = num_rooms
        self._room = 0

    def tasks(self, split: str, seed: int) -> Iterator[Task]:
        return numbered_tasks(split, seed)

    async def reset(self, task: Task) -> Observation:
        return Observation([user(f"Task {task.id}: you are in room 0.")], state_key="room 0")

    async def step(self, reply: Message) -> Step:
        assert reply["role"] == "assistant"
        self._room += 1
        if self._room == self._num_rooms:
            return Step(reward=self._outcome, terminated=True, info={"rooms": self._room, "name": "out"})
        reward = 0.25 if self._room == 1 else 0.0
        return Step([user(f"You are in room {self._room}.")], reward, state_key=f"room {self._room}")


class Endless(Interaction):
    """It is never content, unless the reply is "bye"; its score is 0.75."""

    def tasks(self, split: str, seed: int) -> Iterator[Task]:
        return numbered_tasks(split, seed)

    async def start(self, task: Task) -> Observation:
        return Observation([user("Say bye.")])

    async def respond(self, messages: Sequence[Message]) -> Feedback:
        return Feedback(user("Again."), -0.5, is_done=messages[-1]["content"] == "bye")

    async def score(self) -> float:
        return 0.75


@dataclass
class Faulty(Environment):
    """It chats once with a client of its own, and then does what its `faults` say, attempt by attempt.

    "raise": a mistake of its own; "agent": the agent gives up; "host": an unreachable host; anything else: an outcome.
    """

    faults: list[str]
    outcome: Outcome = field(default_factory=lambda: Outcome(1.0))
    num_attempts: int = 0

    def tasks(self, split: str, seed: int) -> Iterator[Task]:
        return numbered_tasks(split, seed)

    async def run(self, task: Task, agent: Agent) -> Outcome:
        fault = self.faults[self.num_attempts] if self.num_attempts < len(self.faults) else "none"
        self.num_attempts += 1
        async with httpx2.AsyncClient(trust_env=False, headers={"authorization": f"Bearer {agent.api_key}"}) as client:
            body = {"model": agent.model, "messages": [user(task.id)]}
            response = await client.post(f"{agent.base_url}/chat/completions", json=body)
            response.raise_for_status()
            if fault == "host":
                await client.get("http://127.0.0.1:1")
        if fault == "raise":
            raise KeyError("board")
        if fault == "agent":
            raise AgentFailure("I give up")
        if fault == "sandbox":
            raise InfrastructureFailure("the sandbox has died")
        if fault == "step":
            return replace(self.outcome, step_rewards=[StepReward(response.json()["id"], 0.25)])
        return self.outcome


@asynccontextmanager
async def open_run(
    environment: Environment, url: str, key: str, plan: RunPlan = PLAN, patience: float = 30.0
) -> AsyncIterator[EnvironmentRun]:
    http = ServiceHttp(patience=patience)
    try:
        yield EnvironmentRun(environment, ServiceClient(url, key, http), plan)
    finally:
        await environment.close()
        await http.close()
