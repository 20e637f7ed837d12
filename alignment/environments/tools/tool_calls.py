"""The tool calls of an assistant's message on the OpenAI wire, and the check of their arguments."""

import json
from typing import Literal, NoReturn

from jsonschema.exceptions import ValidationError as SchemaViolation
from jsonschema.exceptions import best_match
from pydantic import BaseModel, ConfigDict, JsonValue
from referencing import Registry
from referencing.exceptions import Unresolvable

from alignment.environments.errors import InfrastructureFailure, ToolError
from alignment.environments.tools.base import JsonObject
from alignment.signals.verifiers import TimedValidator, Unverifiable, schema_time_limit

MAX_ERROR_CHARS = 500


class CalledFunction(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)

    name: str = ""
    arguments: str | JsonObject | None = None  # text on the wire; some engines send an object


class ToolCall(BaseModel):
    """A call as the model wrote it: neither the tool nor valid arguments need exist."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class AssistantMessage(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)

    role: Literal["assistant"] = "assistant"
    tool_calls: tuple[ToolCall, ...] | None = None


def read_arguments(call: ToolCall) -> JsonObject:
    """Return the arguments of a call, {} for none. Raises ToolError if they are no JSON object of valid Unicode."""
    arguments = call.function.arguments
    if isinstance(arguments, str):
        arguments = _parse(arguments)
    try:
        json.dumps(arguments, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:  # a tool could not send them to its service
        raise ToolError("the arguments are not valid Unicode: a surrogate such as \\ud800 is alone") from error
    return arguments or {}


def _parse(arguments: str) -> JsonObject:
    if not arguments.strip():
        return {}
    try:
        parsed: JsonValue = json.loads(arguments, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise ToolError(f"the arguments are not valid JSON: {error}") from error
    if not isinstance(parsed, dict):
        raise ToolError("the arguments must be a JSON object")
    return parsed


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def check_arguments(arguments: JsonObject, schema: JsonObject) -> None:
    """Raises ToolError for arguments that do not match the schema.

    A schema whose references cannot be resolved is a failure of the host. Nothing is fetched.
    """
    try:
        with schema_time_limit():
            violation = best_match(TimedValidator(schema, registry=Registry()).iter_errors(arguments))
    except (Unverifiable, RecursionError) as error:
        raise ToolError(f"the arguments cannot be checked: {error}") from error
    except Unresolvable as error:
        raise InfrastructureFailure(f"the tool's schema has a reference that leads nowhere: {error}") from error
    if violation is not None:
        raise ToolError(_describe(violation))


def _describe(violation: SchemaViolation) -> str:
    """Example: "limit: 'ten' is not of type 'integer'" """
    path = ".".join(str(part) for part in violation.absolute_path)
    text = f"{path}: {violation.message}" if path else violation.message
    return text if len(text) <= MAX_ERROR_CHARS else text[:MAX_ERROR_CHARS] + " …"
