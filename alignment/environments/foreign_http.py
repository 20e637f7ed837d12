"""Environments behind HTTP: a resources server of NeMo Gym, with `/seed_session`, its tools, and `/verify`.

The loop is ours, in place of NeMo Gym's agent. A task is a row of its data: `responses_create_params` with the first
messages and the tools, and whatever the server compares the answer with. A server knows an attempt by its cookies.
"""

import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal, cast
from uuid import uuid4

import httpx2
from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, JsonValue, ValidationError

from alignment.environments.episode_loop import LoopEnvironment, limit_reward
from alignment.environments.errors import InfrastructureFailure, ToolError
from alignment.environments.foreign import row_tasks
from alignment.environments.host_process import HostConfig
from alignment.environments.http_client import (
    ANSWER_SECONDS,
    Answer,
    bearer_headers,
    open_client,
    post_json,
    require_key,
)
from alignment.environments.protocols import Environment, Message, Observation, Step, Steps, Task
from alignment.environments.tools.base import JsonObject, ToolSchema
from alignment.environments.tools.tool_calls import AssistantMessage, ToolCall, read_arguments
from alignment.environments.worlds import LOWEST_REWARD, StepsWorld
from alignment.errors import UnavailableEnvironment

NOUN = "the environment's server"


class FunctionTool(BaseModel):
    """A tool of the Responses API. What else it has, such as `strict`, is left out: it would make replies excluded."""

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: JsonObject | None = None


class CreateParams(BaseModel):
    """`responses_create_params` of a row."""

    model_config = ConfigDict(extra="ignore")

    input: str | list[JsonObject]
    instructions: str | None = None
    tools: list[FunctionTool] = []

    def messages(self) -> list[JsonObject]:
        """Return the first messages of the chat."""
        system: list[JsonObject] = [{"role": "system", "content": self.instructions}] if self.instructions else []
        first: list[JsonObject] = (
            [{"role": "user", "content": self.input}] if isinstance(self.input, str) else self.input
        )
        return [*system, *(_to_chat_message(message) for message in first)]


class Verdict(BaseModel):
    """The answer of `/verify`, of which only the reward is used."""

    reward: FiniteFloat


class HttpArguments(BaseModel):
    """The arguments of an HTTP environment.

    Attributes:
        tasks: A file of JSON lines, each the row of a task.
        key_variable: An environment variable with the server's key.
        seconds: For an answer.
        unfinished_reward: The outcome of an attempt that a limit ends.
    """

    model_config = ConfigDict(extra="forbid")

    tasks: Path
    key_variable: str | None = None
    seconds: float = ANSWER_SECONDS
    unfinished_reward: float = Field(LOWEST_REWARD, ge=-1, le=1)


class ResourcesSession(Steps):
    """One attempt on a resources server."""

    def __init__(self, url: str, arguments: HttpArguments, headers: Mapping[str, str]) -> None:
        self._url = url.rstrip("/")
        self._tasks = arguments.tasks
        self._seconds = arguments.seconds
        self._unfinished_reward = arguments.unfinished_reward
        self._client = open_client(headers)
        self._row: JsonObject = {}
        self._output: list[JsonValue] = []  # of the Responses API, which `/verify` reads

    def tasks(self, split: str, seed: int) -> Iterator[Task]:
        """Return the rows of the file, in its order, whatever the split."""
        return row_tasks(self._tasks, seed)

    async def reset(self, task: Task) -> Observation:
        self._row = dict(task.data)
        try:
            params = CreateParams.model_validate(self._row.get("responses_create_params"))
        except ValidationError as error:
            raise UnavailableEnvironment(
                f"{task.id} has no responses_create_params that can be used: {error}"
            ) from error
        await self._post("/seed_session", self._row)
        tools = [
            {"type": "function", "function": tool.model_dump(exclude={"type"}, exclude_none=True)}
            for tool in params.tools
        ]
        return Observation(params.messages(), cast("list[ToolSchema]", tools))

    async def step(self, reply: Message) -> Step:
        text = str(reply.get("content") or "")
        calls = AssistantMessage.model_validate(reply).tool_calls or ()
        if text or not calls:
            self._output.append(_output_message(text))
        if calls:
            return Step([await self._execute(call) for call in calls])
        answer = await self._post("/verify", self._row | {"response": self._response()})
        try:
            verdict = Verdict.model_validate_json(answer.text)
        except ValidationError as error:
            raise InfrastructureFailure(f"{NOUN} has answered /verify without a reward") from error
        return Step(reward=limit_reward(verdict.reward), terminated=True, info={"score": verdict.reward})

    def unfinished_reward(self) -> float:
        return self._unfinished_reward

    async def close(self) -> None:
        await self._client.aclose()

    async def _execute(self, call: ToolCall) -> Message:
        """Return a tool's answer. A refusal of the server is one, too: the call may be wrong."""
        result = await self._result(call)
        item: JsonObject = {"type": "function_call", "call_id": call.id, "id": call.id, "status": "completed"}
        self._output.append(item | {"name": call.function.name, "arguments": call.function.arguments})
        self._output.append({"type": "function_call_output", "call_id": call.id, "output": result})
        return {"role": "tool", "tool_call_id": call.id, "content": result}

    async def _result(self, call: ToolCall) -> str:
        params = CreateParams.model_validate(self._row["responses_create_params"])
        name = call.function.name
        if name not in {tool.name for tool in params.tools}:
            return f"Error: there is no tool {name!r}"
        try:
            arguments = read_arguments(call)
        except ToolError as error:
            return f"Error: {error}"
        answer = await post_json(self._client, f"{self._url}/{name}", arguments, noun=NOUN, seconds=self._seconds)
        if answer.status >= 500:
            raise InfrastructureFailure(f"{NOUN} has answered a call of {name} with {answer.status}")
        return answer.text

    async def _post(self, path: str, body: JsonValue) -> Answer:
        answer = await post_json(self._client, f"{self._url}{path}", body, noun=NOUN, seconds=self._seconds)
        require_key(answer.status, NOUN)
        if not answer.is_success or answer.is_cut:
            raise InfrastructureFailure(f"{NOUN} has answered {path} with {answer.status}")
        return answer

    def _response(self) -> JsonObject:
        """Return the attempt as one response of the Responses API."""
        return {
            "id": f"resp_{uuid4().hex}",
            "object": "response",
            "created_at": int(time.time()),
            "model": "policy",
            "output": self._output,
            "parallel_tool_calls": True,
            "tool_choice": "auto",
            "tools": cast("Mapping[str, JsonValue]", self._row["responses_create_params"]).get("tools") or [],
        }


def _output_message(text: str) -> JsonObject:
    content: list[JsonValue] = [{"type": "output_text", "text": text, "annotations": []}]
    return {
        "id": f"msg_{uuid4().hex}",
        "type": "message",
        "role": "assistant",
        "status": "completed",
        "content": content,
    }


def _to_chat_message(message: JsonObject) -> JsonObject:
    """Return a message of the Responses API as one of a chat: its role, and the texts of its content."""
    content = message.get("content")
    if isinstance(content, list):
        content = "\n".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    role = message.get("role", "user")
    return {"role": "system" if role == "developer" else role, "content": content}


def open_http(scheme: str, rest: str, arguments: JsonObject, _: HostConfig | None) -> Environment:
    """Return the environment of a resources server, with HttpArguments."""
    try:
        taken = HttpArguments.model_validate(arguments)
    except ValidationError as error:
        raise UnavailableEnvironment(
            "an HTTP environment takes `tasks`, a file of JSON lines, `key_variable`, `seconds` of an answer, and "
            "`unfinished_reward`"
        ) from error
    url = str(httpx2.URL(f"{scheme}:{rest}"))
    headers = bearer_headers(taken.key_variable)
    return LoopEnvironment(lambda: StepsWorld(ResourcesSession(url, taken, headers)))
