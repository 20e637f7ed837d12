"""Python functions as tools: the schema comes from the type hints and the docstring.

Example:
    def add(a: int, b: int) -> int:
        \"\"\"Add two numbers.

        Args:
            a: The first number.
            b: The second number.
        \"\"\"
        return a + b

    toolbox = Toolbox([FunctionTool(add)])

The function is trusted: it runs in this process. What models write belongs into a sandbox (`python_tool`).
"""

import asyncio
import inspect
import re
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, get_type_hints

from pydantic import BaseModel, ConfigDict, ValidationError, create_model
from pydantic.fields import FieldInfo
from pydantic_core import to_json

from alignment.environments.errors import InfrastructureFailure, ToolError, describe_error
from alignment.environments.tools.base import EpisodeContext, JsonObject, Tool, ToolResult

MAX_RUNNING_CALLS = 32
WAIT_SECONDS = 60.0  # for a free place
ARGUMENT = re.compile(r"^(\w+)(?: *\([^)]*\))?: *(.*)$")

Function = Callable[..., object] | Callable[..., Awaitable[object]]


class FunctionTool(Tool[EpisodeContext]):
    """A function, called with keyword arguments, or a coroutine function.

    A parameter whose type is EpisodeContext gets the episode, and is no part of the schema. A result that is no text
    becomes JSON. ToolResult passes as it is.

    An ordinary function runs in a thread, which cannot be stopped: after a time-out it goes on. At most
    `max_running_calls` of them run at a time, and the others wait, which does not count as time of the call. Where
    calls that hang hold all places, that is a failure of the host.
    """

    def __init__(
        self,
        function: Function,
        *,
        name: str | None = None,
        description: str | None = None,
        max_running_calls: int = MAX_RUNNING_CALLS,
        wait_seconds: float = WAIT_SECONDS,
    ) -> None:
        self._function = function
        hints = get_type_hints(function, include_extras=True)
        summary, descriptions = _read_docstring(inspect.getdoc(function) or "")
        self.name = name or str(getattr(function, "__name__", type(function).__name__))
        self.description = summary if description is None else description
        parameters = inspect.signature(function).parameters
        self._context_names = [parameter for parameter in parameters if hints.get(parameter) is EpisodeContext]
        self._model = _argument_model(function, hints, descriptions, excluded=self._context_names)
        self.parameters = _schema(self._model)
        self._max_running = max_running_calls
        self._wait_seconds = wait_seconds
        self._running: set[object] = set()
        self._hung: set[object] = set()  # those whose call is over
        self._waiting: set[asyncio.Future[None]] = set()

    async def create(self, episode: EpisodeContext) -> EpisodeContext:
        return episode

    async def wait(self) -> None:
        """Wait until fewer than `max_running_calls` run."""
        try:
            async with asyncio.timeout(self._wait_seconds):
                while len(self._running) >= self._max_running:
                    if len(self._hung) >= self._max_running:
                        raise InfrastructureFailure(f"{len(self._hung)} calls of {self.name!r} hang")
                    changed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
                    self._waiting.add(changed)
                    try:
                        await changed
                    finally:
                        self._waiting.discard(changed)
        except TimeoutError as error:
            raise InfrastructureFailure(
                f"no free place for a call of {self.name!r} within {self._wait_seconds:g} s"
            ) from error

    def _wake(self) -> None:
        for changed in self._waiting:
            if not changed.done():
                changed.set_result(None)

    async def execute(self, state: EpisodeContext, arguments: JsonObject) -> ToolResult:
        try:
            model = self._model.model_validate(arguments)
        except ValidationError as error:
            raise ToolError(_describe(error)) from error
        values: dict[str, object] = {name: getattr(model, name) for name in model.model_fields_set}
        values |= dict.fromkeys(self._context_names, state)
        if inspect.iscoroutinefunction(self._function):
            return _to_result(await self._function(**values))
        return _to_result(await self._run_in_thread(values))

    async def _run_in_thread(self, values: dict[str, object]) -> object:
        """Run the function in a thread of its own: those of asyncio's pool are few, and may all hang."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[object] = loop.create_future()

        def finish(value: object, error: Exception | None) -> None:
            self._wake()
            if done.done():
                return  # cancelled by the time-out
            if error is None:
                done.set_result(value)
            else:
                done.set_exception(error)

        def call() -> None:
            value: object = None
            failure: Exception | None = None
            try:
                value = self._function(**values)
            except (SystemExit, StopIteration) as error:  # a future refuses the latter
                failure = RuntimeError(describe_error(error))
            except Exception as error:
                failure = error
            self._running.discard(done)
            self._hung.discard(done)
            with suppress(RuntimeError):  # the loop has been closed meanwhile
                loop.call_soon_threadsafe(finish, value, failure)

        self._running.add(done)
        threading.Thread(target=call, daemon=True, name=f"tool-{self.name}").start()
        try:
            return await done
        except asyncio.CancelledError:
            if done in self._running:
                self._hung.add(done)
                self._wake()
            raise


def _to_result(value: object) -> ToolResult:
    if isinstance(value, ToolResult):
        return value
    if isinstance(value, str):
        return ToolResult(value)
    return ToolResult("" if value is None else to_json(value, fallback=str).decode())


def _argument_model(
    function: Function, hints: dict[str, Any], descriptions: dict[str, str], excluded: list[str]
) -> type[BaseModel]:
    """Return a model with a field for each parameter. Raises TypeError for a parameter that no schema can describe."""
    fields: dict[str, Any] = {}
    for name, parameter in inspect.signature(function).parameters.items():
        if name in excluded:
            continue
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise TypeError(f"{function}: {name!r} cannot be given by name")
        if name not in hints:
            raise TypeError(f"{function}: {name!r} has no type hint")
        default = ... if parameter.default is parameter.empty else parameter.default
        field = FieldInfo.from_annotated_attribute(hints[name], default)
        field.description = field.description or descriptions.get(name)
        fields[name] = (hints[name], field)
    return create_model("Arguments", __config__=ConfigDict(extra="forbid", protected_namespaces=()), **fields)


def _schema(model: type[BaseModel]) -> JsonObject:
    """Return the model's JSON schema without titles, which would be repeated in every prompt."""
    schema: JsonObject = model.model_json_schema()
    schema.pop("title", None)
    properties = schema.get("properties")
    if isinstance(properties, dict):
        for field in properties.values():
            if isinstance(field, dict):
                field.pop("title", None)
    return schema


def _describe(error: ValidationError) -> str:
    """Example: "day: Input should be a valid date" """
    return "; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors()[:5])


def _read_docstring(text: str) -> tuple[str, dict[str, str]]:
    """Return the text above "Args:" and the descriptions in it, as Google's style has them."""
    summary, _, rest = text.partition("\nArgs:\n")
    descriptions: dict[str, str] = {}
    current: str | None = None
    indent: int | None = None
    for line in rest.splitlines():
        depth = len(line) - len(line.lstrip())
        if not line.strip():
            continue
        if depth == 0:
            break  # another section
        indent = depth if indent is None else indent
        match = ARGUMENT.match(line.strip()) if depth == indent else None
        if match is not None:
            current = match[1]
            descriptions[current] = match[2]
        elif current is not None:
            descriptions[current] += " " + line.strip()
    return summary.split("\n\nReturns:")[0].split("\n\nRaises:")[0].strip(), descriptions
