"""Execute the tool calls of an agent's replies: limits, and a message for each call.

The model's mistakes become tool messages that it can learn from. Failures of the host are raised.

Example:
    toolbox = Toolbox([calculator, search])
    async with toolbox.open(EpisodeContext("ep-1")) as tools:
        while (reply := await chat(messages, tools=toolbox.schemas()))["tool_calls"]:
            messages += [reply, *await tools.execute(reply)]
        reward = sum((await tools.rewards()).values())
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Generic, Literal, TypedDict

from alignment.environments.errors import InfrastructureFailure, ToolError, describe_error, is_host_failure
from alignment.environments.tools.base import EpisodeContext, State, Tool, ToolResult, ToolSchema
from alignment.environments.tools.limits import ToolLimits
from alignment.environments.tools.result_text import cut_text
from alignment.environments.tools.tool_calls import AssistantMessage, ToolCall, check_arguments, read_arguments

log = logging.getLogger(__name__)


class Fault(StrEnum):
    """What was wrong with a call, by the model's doing."""

    TURN_LIMIT = "turn_limit"
    EPISODE_LIMIT = "episode_limit"
    UNKNOWN_TOOL = "unknown_tool"
    BAD_ARGUMENTS = "bad_arguments"
    TIMEOUT = "timeout"
    EXCEPTION = "exception"


class ToolMessage(TypedDict):
    """A message of the chat that answers a tool call."""

    role: Literal["tool"]
    tool_call_id: str
    content: str


@dataclass(frozen=True)
class CallRecord:
    """What became of a call. `fault` is None if the tool returned a result."""

    call_id: str
    tool: str
    fault: Fault | None
    result: ToolResult
    seconds: float


class _Refused(Exception):
    def __init__(self, fault: Fault, message: str) -> None:
        super().__init__(message)
        self.fault = fault


class _OpenTool(Generic[State]):
    """A tool in an episode. Its state is created before its first call, once."""

    def __init__(self, tool: Tool[State], episode: EpisodeContext, seconds: float) -> None:
        self._tool = tool
        self._episode = episode
        self._seconds = seconds
        self._lock = asyncio.Lock()
        self._states: list[State] = []  # one at most; None may be a state

    @property
    def is_created(self) -> bool:
        return bool(self._states)

    async def create(self) -> State:
        async with self._lock:
            if not self._states:
                try:
                    async with asyncio.timeout(self._seconds):
                        self._states.append(await self._tool.create(self._episode))
                except Exception as error:
                    raise InfrastructureFailure(
                        f"the tool {self._tool.name!r} could not be created: {describe_error(error)}"
                    ) from error
        return self._states[0]

    async def execute(self, call: ToolCall, limits: ToolLimits) -> ToolResult:
        """Raises _Refused for what the model sees, and InfrastructureFailure."""
        try:
            arguments = read_arguments(call)
            check_arguments(arguments, self._tool.parameters)
        except ToolError as error:
            raise _Refused(Fault.BAD_ARGUMENTS, str(error)) from error
        state = await self.create()
        await self._wait()
        try:
            async with asyncio.timeout(None if self._tool.has_own_time_limit else limits.call_seconds) as limit:
                return await self._tool.execute(state, arguments)
        except ToolError as error:
            raise _Refused(Fault.EXCEPTION, str(error)) from error
        except Exception as error:
            if limit.expired():
                raise _Refused(Fault.TIMEOUT, f"no result within {limits.call_seconds:g} s") from error
            if is_host_failure(error):
                raise InfrastructureFailure(f"{self._tool.name}: {describe_error(error)}") from error
            raise _Refused(Fault.EXCEPTION, describe_error(error)) from error

    async def _wait(self) -> None:
        try:
            await self._tool.wait()
        except InfrastructureFailure:
            raise
        except Exception as error:
            raise InfrastructureFailure(f"{self._tool.name}: {describe_error(error)}") from error

    async def reward(self) -> float:
        try:
            async with asyncio.timeout(self._seconds):
                return await self._tool.reward(self._states[0])
        except Exception as error:
            raise InfrastructureFailure(f"no reward of {self._tool.name!r}: {describe_error(error)}") from error

    async def release(self) -> None:
        """Release the state, if there is one. A failure is logged: the episode is over."""
        for state in self._states:
            try:
                async with asyncio.timeout(self._seconds):
                    await self._tool.release(state)
            except Exception:
                log.warning("tool_release_failed", extra={"tool": self._tool.name}, exc_info=True)
        self._states.clear()


class EpisodeTools:
    """The tools of one episode, with its count of calls. `records` are all calls, in the order of the replies."""

    def __init__(self, tools: Mapping[str, Tool[Any]], limits: ToolLimits, episode: EpisodeContext) -> None:
        self._tools = {name: _OpenTool(tool, episode, limits.create_seconds) for name, tool in tools.items()}
        self._limits = limits
        self._num_calls = 0
        self.records: list[CallRecord] = []

    async def execute(self, message: Mapping[str, object]) -> list[ToolMessage]:
        """Execute the `tool_calls` of an assistant's message, and return a message for each, in their order.

        Raises InfrastructureFailure when the host fails, after the other calls were cancelled; the episode cannot go
        on. Raises pydantic's ValidationError for what is no assistant's message.
        """
        calls = AssistantMessage.model_validate(message).tool_calls or ()
        first_number = self._num_calls
        self._num_calls += len(calls)
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(self._execute_one(call, place, first_number + place))
                    for place, call in enumerate(calls)
                ]
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None
        records = [task.result() for task in tasks]
        self.records += records
        return [ToolMessage(role="tool", tool_call_id=record.call_id, content=record.result.text) for record in records]

    async def _execute_one(self, call: ToolCall, place: int, number: int) -> CallRecord:
        started = time.monotonic()
        fault: Fault | None = None
        try:
            result = await self._find(call, place, number).execute(call, self._limits)
        except _Refused as refused:
            fault, result = refused.fault, ToolResult(f"Error: {refused}")
        text = cut_text(result.text, self._limits.result_bytes)
        result = ToolResult(text, result.reward, result.metrics)
        return CallRecord(call.id, call.function.name, fault, result, time.monotonic() - started)

    def _find(self, call: ToolCall, place: int, number: int) -> _OpenTool[Any]:
        limits = self._limits
        if number >= limits.calls_per_episode:
            raise _Refused(Fault.EPISODE_LIMIT, f"not executed: all {limits.calls_per_episode} tool calls are used")
        if place >= limits.calls_per_turn:
            raise _Refused(Fault.TURN_LIMIT, f"not executed: at most {limits.calls_per_turn} tool calls at a time")
        if call.function.name not in self._tools:
            names = ", ".join(self._tools)
            raise _Refused(Fault.UNKNOWN_TOOL, f"there is no tool {call.function.name[:100]!r}; there are: {names}")
        return self._tools[call.function.name]

    async def rewards(self) -> dict[str, float]:
        """Return the reward of each tool that was called, by name: that of its steps, and that of its end."""
        rewards: dict[str, float] = {}
        for name, tool in self._tools.items():
            if tool.is_created:
                steps = sum(record.result.reward for record in self.records if record.tool == name)
                rewards[name] = steps + await tool.reward()
        return rewards

    def count_faults(self) -> Counter[Fault]:
        """Return how many calls had each fault. Many mean that the agent works around its tools."""
        return Counter(record.fault for record in self.records if record.fault is not None)

    async def release(self) -> None:
        for tool in self._tools.values():
            await tool.release()


class Toolbox:
    """Tools by name, with limits. One toolbox serves many episodes at a time."""

    def __init__(self, tools: Sequence[Tool[Any]], limits: ToolLimits | None = None) -> None:
        self._tools = {tool.name: tool for tool in tools}
        if len(self._tools) != len(tools):
            raise ValueError("two tools have the same name")
        self._limits = limits or ToolLimits()

    def schemas(self) -> list[ToolSchema]:
        """Return `tools` of a chat request."""
        return [tool.schema() for tool in self._tools.values()]

    @asynccontextmanager
    async def open(self, episode: EpisodeContext) -> AsyncIterator[EpisodeTools]:
        """Yield the tools of an episode, and release them at its end."""
        tools = EpisodeTools(self._tools, self._limits, episode)
        try:
            yield tools
        finally:
            await tools.release()
