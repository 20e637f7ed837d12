"""Environments on a server of OpenEnv: `openenv:http://127.0.0.1:8000?sessions=8`.

Each attempt has a session, and so an environment, of its own; the loop is ours. What the server says about its actions
decides how a reply becomes one (`openenv_actions`). A reply that is none is the agent's mistake, and no step.
"""

import asyncio
import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import httpx2
from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, JsonValue, ValidationError

from alignment.environments.attempts import Attempt
from alignment.environments.episode_loop import LoopEnvironment, limit_reward
from alignment.environments.errors import InfrastructureFailure, ToolError
from alignment.environments.foreign import parse_name, row_tasks, seeded_tasks
from alignment.environments.host_process import HostConfig
from alignment.environments.http_client import (
    ANSWER_SECONDS,
    MAX_BODY_BYTES,
    bearer_headers,
    get_json,
    open_client,
    require_key,
)
from alignment.environments.openenv_actions import ActionForm, NoAction, choose_form
from alignment.environments.openenv_session import (
    NOUN,
    Observed,
    OpenEnvSession,
    RefusedAction,
    begin_session,
)
from alignment.environments.openenv_tools import MessageCalls, StepCalls, ToolCalls
from alignment.environments.protocols import Environment, Message, Observation, Step, Steps, Task
from alignment.environments.tools.base import JsonObject
from alignment.environments.tools.result_text import cut_text
from alignment.environments.tools.tool_calls import AssistantMessage, ToolCall, read_arguments
from alignment.environments.typed_answers import first_problem
from alignment.environments.worlds import LOWEST_REWARD, StepsWorld
from alignment.errors import UnavailableEnvironment

START_SECONDS = 120.0
MISTAKES_IN_A_ROW = 3  # replies without an action, until the episode has failed
TOOL_HINT = "Use the tools."
WEBSOCKET_SCHEMES = {"http": "ws", "https": "wss", "ws": "ws", "wss": "wss"}
HTTP_SCHEMES = {"ws": "http", "wss": "https"}


class OpenEnvArguments(BaseModel):
    """The arguments of an OpenEnv environment.

    Attributes:
        sessions: How many sessions the server allows at a time, its `max_concurrent_envs`.
        tasks: A file of JSON lines, of which each is the parameters of a reset. Without one, tasks are seeds.
        reset: Parameters of all resets.
        action_field: The field of an action that a reply becomes.
        json_actions: A reply has a JSON object, also where one field would do.
        observation_field: What of an observation the agent sees; all of it otherwise.
        prompt: What the agent reads first, instead of a sentence about its actions.
        reward_scale: What the environment pays is multiplied by it.
        unfinished_reward: The outcome of an attempt that a limit ends.
        key_variable: An environment variable with the server's key.
        seconds: For an answer.
        start_seconds: For a session with its first reset, and for a place on a server that has none free.
    """

    model_config = ConfigDict(extra="forbid")

    sessions: int = Field(1, ge=1)
    tasks: Path | None = None
    reset: dict[str, JsonValue] = {}
    action_field: str | None = None
    json_actions: bool = False
    observation_field: str | None = None
    prompt: str | None = None
    reward_scale: FiniteFloat = 1.0
    unfinished_reward: float = Field(LOWEST_REWARD, ge=-1, le=1)
    key_variable: str | None = None
    seconds: float = Field(ANSWER_SECONDS, gt=0)
    start_seconds: float = Field(START_SECONDS, gt=0)


class Schemas(BaseModel):
    """The answer of `/schema`, of which only the actions are used."""

    action: JsonObject


class OpenEnvServer:
    """A server, and what it says about its actions. Raises UnavailableEnvironment if its key is not set."""

    def __init__(self, url: httpx2.URL, arguments: OpenEnvArguments) -> None:
        self.arguments = arguments
        self.headers = bearer_headers(arguments.key_variable)
        self.websocket_url = str(_with_path(url.copy_with(scheme=WEBSOCKET_SCHEMES[url.scheme]), "ws"))
        self._schema_url = str(_with_path(url.copy_with(scheme=HTTP_SCHEMES.get(url.scheme, url.scheme)), "schema"))
        self._lock = asyncio.Lock()
        self._schema: JsonObject | None = None

    async def action_form(self) -> ActionForm | None:
        """Return how replies become actions; None: by calls of tools alone."""
        async with self._lock:
            if self._schema is None:
                self._schema = await self._fetch_schema()
        arguments = self.arguments
        return choose_form(self._schema, field=arguments.action_field, is_json=arguments.json_actions)

    async def _fetch_schema(self) -> JsonObject:
        async with open_client(self.headers) as client:
            answer = await get_json(client, self._schema_url, noun=NOUN, seconds=self.arguments.seconds)
        require_key(answer.status, NOUN)
        if answer.status >= 500:
            raise InfrastructureFailure(f"{NOUN} has answered /schema with {answer.status}")
        try:
            return Schemas.model_validate_json(answer.text if answer.is_success else "").action
        except ValidationError as error:
            raise UnavailableEnvironment(
                f"the server has answered /schema with {answer.status}, and no schema of actions: "
                "it is no server of OpenEnv 0.2 or later"
            ) from error


class OpenEnvSteps(Steps):
    """One attempt in a session of a server."""

    def __init__(self, server: OpenEnvServer) -> None:
        self._server = server
        self._arguments = server.arguments
        self._episode_id = ""
        self._session: OpenEnvSession | None = None
        self._form: ActionForm | None = None
        self._calls: ToolCalls = StepCalls()
        self._tool_names: set[str] = set()
        self._hint = TOOL_HINT
        self._mistakes = 0
        self._return = 0.0

    def tasks(self, split: str, seed: int) -> Iterator[Task]:
        path = self._arguments.tasks
        return seeded_tasks(split, seed) if path is None else row_tasks(path, seed)

    def take_attempt(self, attempt: Attempt) -> None:
        self._episode_id = attempt.episode_id

    async def reset(self, task: Task) -> Observation:
        self._form = await self._server.action_form()
        arguments = self._arguments
        parameters: JsonObject = {"seed": task.seed} | arguments.reset | dict(task.data)
        if self._episode_id:
            parameters.setdefault("episode_id", self._episode_id)
        self._session, observed = await begin_session(
            self._server.websocket_url,
            parameters,
            headers=self._server.headers,
            start_seconds=arguments.start_seconds,
            seconds=arguments.seconds,
        )
        if observed.done:
            raise InfrastructureFailure("the environment is over before the first reply")
        if self._form is not None:
            self._calls, self._hint = MessageCalls(), self._form.hint
        tools = await self._calls.list_tools(self._session)
        self._tool_names = {tool.name for tool in tools}
        prompt = self._hint if arguments.prompt is None else arguments.prompt
        content = "\n\n".join(part for part in (prompt, self._show(observed)) if part)
        return Observation([{"role": "user", "content": content}], [tool.schema_of_chat() for tool in tools])

    async def step(self, reply: Message) -> Step:
        if calls := AssistantMessage.model_validate(reply).tool_calls:
            self._mistakes = 0
            return await self._execute(calls)
        if self._form is None:
            return self._refuse("")
        session = self._open_session()
        try:
            observed = await session.step(self._form.read(str(reply.get("content") or "")))
        except NoAction:
            return self._refuse("")
        except RefusedAction as error:
            return self._refuse(f" {error}.")
        self._mistakes = 0
        return await self._answer([{"role": "user", "content": self._show(observed)}], [observed])

    def unfinished_reward(self) -> float:
        return self._arguments.unfinished_reward

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def _execute(self, calls: tuple[ToolCall, ...]) -> Step:
        """Return the answers of the tools, which are called one after the other until the environment is over."""
        messages: list[Message] = []
        results: list[Observed] = []
        for call in calls:
            text, observed = await self._call(call)
            content = cut_text(text, MAX_BODY_BYTES)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": content})
            results.append(observed)
            if observed.done:
                break
        return await self._answer(messages, results)

    async def _call(self, call: ToolCall) -> tuple[str, Observed]:
        name = call.function.name
        if name not in self._tool_names:
            return f"Error: there is no tool {name!r}", Observed()
        try:
            arguments = read_arguments(call)
        except ToolError as error:
            return f"Error: {error}", Observed()
        return await self._calls.call(self._open_session(), name, arguments)

    async def _answer(self, messages: list[Message], results: list[Observed]) -> Step:
        """Return the step of one or more results. At the end, numbers of the environment's state become metrics."""
        paid = sum(observed.reward or 0.0 for observed in results)
        self._return += paid
        is_over = results[-1].done
        info: JsonObject = {}
        if is_over:
            with suppress(InfrastructureFailure):  # the outcome is known without it
                info = await self._open_session().state()
        reward = limit_reward(paid * self._arguments.reward_scale)
        return Step(messages, reward, terminated=is_over, info=info | {"return": self._return})

    def _refuse(self, detail: str) -> Step:
        """Return what a reply without an action leads to: the agent may try again, but not for ever."""
        self._mistakes += 1
        if self._mistakes == MISTAKES_IN_A_ROW:
            return Step(reward=LOWEST_REWARD, terminated=True, info={"return": self._return, "invalid_action": True})
        return Step([{"role": "user", "content": f"That is no action.{detail} {self._hint}"}])

    def _show(self, observed: Observed) -> str:
        """Return an observation in text: its only text, or else JSON, without what is null."""
        present: JsonObject = {name: value for name, value in observed.observation.items() if value is not None}
        if (name := self._arguments.observation_field) is not None:
            return _to_text(present.get(name, ""))
        [*values] = present.values()
        if not values:
            return ""
        return _to_text(values[0] if len(values) == 1 and isinstance(values[0], str) else present)

    def _open_session(self) -> OpenEnvSession:
        assert self._session is not None, "reset comes first"
        return self._session


class OpenEnvLoop(LoopEnvironment):
    """The environment of a server, whose loop is ours."""

    def __init__(self, server: OpenEnvServer) -> None:
        super().__init__(lambda: StepsWorld(OpenEnvSteps(server)))
        self._server = server

    async def max_concurrency(self) -> int:
        return self._server.arguments.sessions


def open_openenv(rest: str, arguments: JsonObject, _: HostConfig | None) -> Environment:
    """Return the environment of a server, with OpenEnvArguments."""
    address, named = parse_name(rest)
    try:
        taken = OpenEnvArguments.model_validate(named | arguments)
    except ValidationError as error:
        where, problem = first_problem(error)
        raise UnavailableEnvironment(f"the argument {where} of an OpenEnv environment: {problem}") from error
    try:
        url = httpx2.URL(address)
    except httpx2.InvalidURL as error:
        raise UnavailableEnvironment(f"openenv: needs a URL, not {address!r}") from error
    if url.scheme not in WEBSOCKET_SCHEMES or not url.host:
        raise UnavailableEnvironment(f"openenv: needs a URL such as http://127.0.0.1:8000, not {address!r}")
    return OpenEnvLoop(OpenEnvServer(url, taken))


def _with_path(url: httpx2.URL, name: str) -> httpx2.URL:
    return url.copy_with(path=f"{url.path.rstrip('/')}/{name}")


def _to_text(value: JsonValue) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return cut_text(text, MAX_BODY_BYTES)
