"""What a tool is: a name, a JSON schema, and four methods that live as long as an episode.

The life of a tool in an episode is that of verl's BaseTool: `create`, any number of `execute`, `reward`, `release`.
What verl finds by an instance id is passed on here as the state, which has a type.

Example:
    class Orders(Tool[Database]):
        name = "find_order"
        description = "Find an order by its number."
        parameters = {"type": "object", "properties": {"number": {"type": "integer"}}, "required": ["number"]}

        async def create(self, episode: EpisodeContext) -> Database:
            return await Database.open(str(episode.task["database"]))

        async def execute(self, state: Database, arguments: JsonObject) -> ToolResult:
            return ToolResult(await state.find(arguments["number"]))

        async def release(self, state: Database) -> None:
            await state.close()
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Generic, TypedDict, TypeVar

from pydantic import JsonValue

JsonObject = dict[str, JsonValue]
State = TypeVar("State")


@dataclass(frozen=True)
class EpisodeContext:
    """The episode that a tool works for.

    `task` is the row of the task, as in verl's `tools_kwargs`: also what the model must not see, such as a reference.
    `seed` is for tools that draw random numbers.
    """

    id: str
    task: Mapping[str, JsonValue] = field(default_factory=dict)
    seed: int = 0


@dataclass(frozen=True)
class ToolResult:
    """What a call returned: the text for the model, a reward of this step, and figures for metrics."""

    text: str
    reward: float = 0.0
    metrics: Mapping[str, float] = field(default_factory=dict)


class FunctionSchema(TypedDict):
    name: str
    description: str
    parameters: JsonObject


class ToolSchema(TypedDict):
    """An element of `tools` in a chat request."""

    type: str
    function: FunctionSchema


class Tool(ABC, Generic[State]):
    """A tool. One object serves many episodes at a time; what belongs to one episode is in its state.

    `parameters` is the JSON schema of the arguments, which are checked against it before `execute`.

    Of an exception of `execute` the model sees the type and the message's first line, without queries of URLs.
    ToolError's message is shown as it is. InfrastructureFailure, and an error of a connection, end the episode instead.

    `has_own_time_limit`: the tool ends its calls itself, since a service that is slow, or for which a call waits, is
    not the model's fault. `call_seconds` of the limits does not hold for it.
    """

    has_own_time_limit = False

    name: str
    description: str
    parameters: JsonObject

    @abstractmethod
    async def create(self, episode: EpisodeContext) -> State:
        """Return the state of a new episode, before its first call. All exceptions are failures of the host."""

    async def wait(self) -> None:
        """Wait until a call may begin, which is no part of its time. All exceptions are failures of the host."""
        return None

    @abstractmethod
    async def execute(self, state: State, arguments: JsonObject) -> ToolResult:
        """Return the result of one call. Calls of one turn run at the same time, with the same state."""

    async def reward(self, state: State) -> float:
        """Return the tool's reward for the episode, at its end. All exceptions are failures of the host."""
        return 0.0

    async def release(self, state: State) -> None:
        """Free what the state holds. It is also called after a failure."""
        return None

    def schema(self) -> ToolSchema:
        """Return what a chat request lists in `tools`."""
        function = FunctionSchema(name=self.name, description=self.description, parameters=self.parameters)
        return ToolSchema(type="function", function=function)
