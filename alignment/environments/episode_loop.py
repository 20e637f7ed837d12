"""Our loop of an attempt: the agent's reply, what the world says to it, and so on until the world or a limit ends it.

An exception of the world says that the environment failed. A limit ends the attempt, and it is graded as any other.
"""

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from ssl import SSLContext
from typing import TypeVar, cast

from alignment.environments.agent_chat import AgentChat, LimitReached, Reply
from alignment.environments.attempts import Attempt, ChatEndpoint
from alignment.environments.errors import InfrastructureFailure
from alignment.environments.protocols import (
    Agent,
    Environment,
    Limits,
    Message,
    Observation,
    Outcome,
    Reason,
    Step,
    StepReward,
    Task,
)
from alignment.environments.service_http import ServiceHttp, ServiceTransport
from alignment.environments.tools.base import EpisodeContext, ToolSchema
from alignment.environments.tools.toolbox import EpisodeTools
from alignment.environments.worlds import LOWEST_REWARD, World

log = logging.getLogger(__name__)
WORLD_SECONDS = 60.0  # for an answer of the world, beyond the deadline
Value = TypeVar("Value")


class LoopEnvironment(Environment):
    """An environment of worlds. `make_world` returns a new one for each attempt.

    Chats are sent with `http`, or else with a client of its own, which trusts the certificates of `verify`.
    """

    def __init__(self, make_world: Callable[[], World], http: ServiceTransport | None = None) -> None:
        self._make_world = make_world
        self._http = http
        self._endpoint: ChatEndpoint | None = None
        self._listing_world: World | None = None  # it plays nothing
        self.verify: SSLContext | None = None

    def tasks(self, split: str, seed: int) -> Iterator[Task]:
        self._listing_world = self._make_world()
        return self._listing_world.tasks(split, seed)

    def use_service(self, endpoint: ChatEndpoint) -> None:
        """Take the endpoint for chats that are no part of an episode, such as those of simulated users."""
        self._endpoint = endpoint

    async def describe_attempt(self, task: Task, seed: int) -> Mapping[str, str]:
        """Return what is recorded with an attempt, as the world that lists the tasks describes it."""
        if self._listing_world is None:
            self._listing_world = self._make_world()
        return await self._listing_world.describe(task, seed)

    async def run(self, task: Task, agent: Agent) -> Outcome:
        if self._http is None:
            self._http = ServiceHttp(connections=1000, verify=self.verify)
        world = self._make_world()
        attempt = Attempt(agent.seed, agent.episode_id, self._endpoint, self._http)
        try:
            return await _Attempt(world, AgentChat(self._http, agent), task, agent).play(attempt)
        finally:
            await _close(world)

    async def close(self) -> None:
        if self._http is not None:
            await self._http.close()
            self._http = None


async def _close(world: World) -> None:
    """Close the world. A failure is logged: the attempt is over."""
    try:
        async with asyncio.timeout(WORLD_SECONDS):
            await world.close()
    except Exception:
        log.warning("world_close_failed", exc_info=True)


class _Attempt:
    """One attempt, with its messages and the rewards of its replies."""

    def __init__(self, world: World, chat: AgentChat, task: Task, agent: Agent) -> None:
        self._world = world
        self._chat = chat
        self._task = task
        self._agent = agent
        self._limits: Limits = agent.limits
        self._messages: list[Message] = []
        self._rewards: list[StepReward] = []
        self._num_tokens = 0
        self._is_over = False  # as the world says
        self._metrics: dict[str, float] = {}
        self._ends_at = asyncio.get_running_loop().time() + self._limits.deadline_seconds

    async def play(self, attempt: Attempt) -> Outcome:
        observation = await self._ask_world(self._world.begin(self._task, attempt))
        self._messages += observation.messages
        async with self._open_tools(observation) as tools:
            reason = await self._play(observation, tools)
            judged = self._world.judge(self._rewards, self._messages, is_over=self._is_over)
            outcome, step_rewards = await self._ask_world(judged)
            if tools is not None:
                outcome += await _end_reward(tools)
                if not self._is_over:
                    outcome = max(LOWEST_REWARD, outcome)
                self._metrics |= {"tool_calls": len(tools.records), "tool_faults": tools.count_faults().total()}
        nonzero = [step for step in step_rewards if step.reward != 0.0]
        return Outcome(check_reward(outcome), nonzero, self._metrics, reason)

    async def _play(self, observation: Observation, tools: EpisodeTools | None) -> Reason:
        """Play until the world or a limit ends it, and return why."""
        schemas = [*observation.tools, *(observation.toolbox.schemas() if observation.toolbox else ())]
        own_names = {schema["function"]["name"] for schema in observation.tools}
        state_key = observation.state_key
        while (limit := self._reached_limit()) is None:
            try:
                reply = await self._ask_agent(schemas, state_key)
            except LimitReached as error:
                return error.reason
            step = await self._answer(reply, tools, own_names)
            self._rewards.append(StepReward(reply.completion_id, check_reward(step.reward)))
            state_key = step.state_key
            if step.terminated or step.truncated:
                self._metrics |= _numbers(step)
                self._is_over = True
                return "completed" if step.terminated else "max_turns"
            if not step.messages:
                raise InfrastructureFailure("the environment neither ended nor answered a reply")
            self._messages += step.messages
        return limit

    def _reached_limit(self) -> Reason | None:
        limits = self._limits
        if limits.max_turns is not None and len(self._rewards) >= limits.max_turns:
            return "max_turns"
        if limits.max_tokens is not None and self._num_tokens >= limits.max_tokens:
            return "max_tokens"
        return "deadline" if asyncio.get_running_loop().time() >= self._ends_at else None

    async def _ask_agent(self, schemas: Sequence[ToolSchema], state_key: str | None) -> Reply:
        try:
            async with asyncio.timeout_at(self._ends_at):
                reply = await self._chat.send(self._messages, schemas, state_key)
        except TimeoutError as error:
            raise LimitReached("deadline") from error
        self._num_tokens += reply.num_tokens
        self._messages.append(reply.message)
        return reply

    async def _answer(self, reply: Reply, tools: EpisodeTools | None, own_names: set[str]) -> Step:
        """Return what the reply leads to: results of the toolbox, or the answer of the world."""
        called = reply.called_tools()
        if tools is None or not called or own_names.intersection(called):
            return await self._ask_world(self._world.answer(self._messages))
        first = len(tools.records)
        results = await tools.execute(reply.message)
        reward = sum(record.result.reward for record in tools.records[first:])
        return Step([cast("Message", result) for result in results], reward)

    async def _ask_world(self, answer: Awaitable[Value]) -> Value:
        """Wait for the world. One that hangs has failed; the agent is not to blame for it."""
        left = max(0.0, self._ends_at - asyncio.get_running_loop().time())
        try:
            async with asyncio.timeout(left + WORLD_SECONDS) as limit:
                return await answer
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise InfrastructureFailure("the environment does not answer") from error

    @asynccontextmanager
    async def _open_tools(self, observation: Observation) -> AsyncIterator[EpisodeTools | None]:
        if observation.toolbox is None:
            yield None
            return
        context = EpisodeContext(self._agent.episode_id, self._task.data, self._task.seed)
        async with observation.toolbox.open(context) as tools:
            yield tools


async def _end_reward(tools: EpisodeTools) -> float:
    """Return the tools' rewards for the attempt as a whole; those of their calls are rewards of the replies."""
    of_calls = sum(record.result.reward for record in tools.records)
    return sum((await tools.rewards()).values()) - of_calls


def check_reward(reward: float) -> float:
    """Return a reward that the service takes. Raises ValueError for another one, which the environment must scale."""
    if not math.isfinite(reward) or not -1.0 <= reward <= 1.0:
        raise ValueError(f"a reward must be from -1 to 1, not {reward:g}")
    return float(reward)


def limit_reward(reward: float) -> float:
    """Return the reward within -1 and 1, for environments of others, which pay what they like.

    Raises ValueError for one that is not finite: `max` and `min` would make one of them of it.
    """
    if not math.isfinite(reward):
        raise ValueError(f"a reward must be a number, not {reward:g}")
    return max(-1.0, min(1.0, reward))


def _numbers(step: Step) -> dict[str, float]:
    return {name: float(value) for name, value in step.info.items() if isinstance(value, int | float)}
