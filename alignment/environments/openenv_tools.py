"""The tools of an OpenEnv server: MCP, either as actions that are paid and may end the episode, or beside the actions.

Environments whose actions are calls of tools take `call_tool` as a step. Others may have tools, too: those are called
by `mcp` messages of the session, which have no reward.
"""

import json
from abc import ABC, abstractmethod

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, JsonValue, ValidationError

from alignment.environments.errors import InfrastructureFailure
from alignment.environments.openenv_session import NOUN, Observed, OpenEnvSession, RefusedAction
from alignment.environments.tools.base import FunctionSchema, JsonObject, ToolSchema

OF_THE_HOST = "transport_error"  # as OpenEnv names a tool's server that is not reached


class ListedTool(BaseModel):
    model_config = ConfigDict(extra="ignore")

    name: str
    description: str | None = None
    parameters: JsonObject = Field({}, validation_alias=AliasChoices("input_schema", "inputSchema"))

    def schema_of_chat(self) -> ToolSchema:
        """Return what a chat request lists in `tools`."""
        parameters = self.parameters or {"type": "object", "properties": {}}
        function = FunctionSchema(name=self.name, description=self.description or "", parameters=parameters)
        return ToolSchema(type="function", function=function)


class ToolList(BaseModel):
    model_config = ConfigDict(extra="ignore")

    tools: list[ListedTool]


class CallFailure(BaseModel):
    model_config = ConfigDict(extra="ignore")

    error_type: str = ""
    message: str = ""


class CallObservation(BaseModel):
    """The observation of a `call_tool` step."""

    model_config = ConfigDict(extra="ignore")

    result: JsonValue = None
    error: CallFailure | None = None


class ContentPart(BaseModel):
    model_config = ConfigDict(extra="ignore")

    type: str = ""
    text: str = ""


class CallResult(BaseModel):
    """The result of a tool as MCP says it."""

    model_config = ConfigDict(extra="ignore")

    content: list[ContentPart]
    is_error: bool = Field(False, validation_alias=AliasChoices("is_error", "isError"))


class ToolCalls(ABC):
    """How a session's tools are listed and called."""

    @abstractmethod
    async def list_tools(self, session: OpenEnvSession) -> list[ListedTool]:
        """Return the tools. Raises InfrastructureFailure."""

    @abstractmethod
    async def call(self, session: OpenEnvSession, name: str, arguments: JsonObject) -> tuple[str, Observed]:
        """Return the text for the agent, with the reward and the end. Raises InfrastructureFailure."""


class StepCalls(ToolCalls):
    """Calls are steps."""

    async def list_tools(self, session: OpenEnvSession) -> list[ListedTool]:
        try:
            observed = await session.step({"type": "list_tools"})
        except RefusedAction as error:
            raise InfrastructureFailure(f"{NOUN} does not list its tools: {error}") from error
        tools = _read_tools(observed.observation)
        if not tools:
            raise InfrastructureFailure(f"{NOUN} has listed no tools, which are its only actions")
        return tools

    async def call(self, session: OpenEnvSession, name: str, arguments: JsonObject) -> tuple[str, Observed]:
        action: JsonObject = {"type": "call_tool", "tool_name": name, "arguments": arguments}
        try:
            observed = await session.step(action)
        except RefusedAction as error:
            return f"Error: {error}", Observed()
        try:
            called = CallObservation.model_validate(observed.observation)
        except ValidationError:
            return _show(observed.observation), observed
        if called.error is None:
            shown = called.result if "result" in observed.observation else observed.observation
            return _result_text(shown), observed
        if called.error.error_type == OF_THE_HOST:
            raise InfrastructureFailure(f"{NOUN} cannot call {name}: {called.error.message}")
        return f"Error: {called.error.message}", observed


class MessageCalls(ToolCalls):
    """Calls are messages beside the steps."""

    async def list_tools(self, session: OpenEnvSession) -> list[ListedTool]:
        response = await session.call_mcp("tools/list", {})
        return _read_tools(response.result) if isinstance(response.result, dict) else []

    async def call(self, session: OpenEnvSession, name: str, arguments: JsonObject) -> tuple[str, Observed]:
        response = await session.call_mcp("tools/call", {"name": name, "arguments": arguments})
        if response.error is not None:
            return f"Error: {response.error.message}", Observed()
        return _result_text(response.result), Observed()


def _read_tools(listed: JsonObject) -> list[ListedTool]:
    try:
        return ToolList.model_validate(listed).tools
    except ValidationError as error:
        raise InfrastructureFailure(f"{NOUN} has answered with what is no list of tools") from error


def _result_text(result: JsonValue) -> str:
    """Return the texts of a result's content. Other parts, such as images, are named."""
    try:
        parsed = CallResult.model_validate(result)
    except ValidationError:
        return _show(result)
    text = "\n".join(part.text if part.type == "text" else f"[{part.type}]" for part in parsed.content)
    return f"Error: {text}" if parsed.is_error else text


def _show(value: JsonValue) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
