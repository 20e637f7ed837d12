"""What handlers share: the services of the process, the dependency for JSON bodies, JSON responses and event streams.

Example:
    @router.post("/deploy")
    async def deploy(body: Annotated[DeployRequest, json_body(DeployRequest)]) -> DeploymentView: ...

Bodies are checked before any other code reads them, so that text which JSON or the database cannot hold results in a
400 response and never in a 500. Large ones are parsed in a thread. The parser and pydantic hold the GIL while they run,
so that a body may hold a limited number of values, and one thread parses one body after another.
"""

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Generic, Self, TypeVar

import orjson
from fastapi import Depends, Request
from fastapi.routing import APIRoute
from pydantic import BaseModel, ConfigDict, ValidationError
from starlette.requests import HTTPConnection
from starlette.responses import Response, StreamingResponse
from starlette.routing import BaseRoute

from alignment.json_values import as_object, as_objects
from app.core.compression import ENCODINGS, decompress, require_known_encoding
from app.core.errors import BadRequest, TooLarge
from app.core.settings import Settings
from app.core.validation_errors import find_problem

M = TypeVar("M", bound=BaseModel)
T = TypeVar("T")
MAX_DEPTH = 64
MAX_VALUES = 50_000  # parsed in about 10 ms in the worst case
MAX_ERRORS = 1000
THREAD_BYTES, THREAD_VALUES = 256 * 1024, 2500  # larger bodies are parsed in a thread
PARSER = ThreadPoolExecutor(1, thread_name_prefix="json-body")
JSON_TEXT = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)  # or an unterminated one: it is searched once
# The OpenAPI description of a stream of server-sent events: `itemSchema` describes one event (OpenAPI 3.2).
EVENT_STREAM = {
    "text/event-stream": {
        "itemSchema": {
            "type": "object",
            "required": ["data"],
            "properties": {
                "event": {"type": "string"},
                "data": {"type": "string", "description": "JSON, or [DONE] at the end of a chat completion"},
            },
        }
    }
}


class StrictModel(BaseModel):
    """A part of a request that may hold no other fields than those of the model."""

    model_config = ConfigDict(extra="forbid")


class RowView(BaseModel):
    """A view whose fields have the names of a row's attributes, but for some."""

    @classmethod
    def from_row(cls, row: object, **fields: object) -> Self:
        """Return the view with `fields`, and with the attributes of the row for all others that the row has."""
        return cls.model_validate(
            {name: getattr(row, name) for name in cls.model_fields if name not in fields and hasattr(row, name)}
            | fields
        )


def json_response(content: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Return a response that FastAPI does not validate again. `content` must be what JSON can hold."""
    return Response(orjson.dumps(content), status, headers, media_type="application/json")


def event_stream(events: AsyncIterator[bytes], headers: dict[str, str]) -> Response:
    """Return a response of server-sent events that no proxy may buffer."""
    headers = {**headers, "cache-control": "no-cache", "x-accel-buffering": "no"}
    return StreamingResponse(events, headers=headers, media_type="text/event-stream")


class Services:
    """Holds one object of each type. `app.main` adds them at start; handlers get them with `services_of`.

    Example: services_of(request).get(Database)
    """

    def __init__(self) -> None:
        self._by_type: dict[type, object] = {}

    def put(self, service: T) -> T:
        """Add an object, or replace the one of its type, and return it."""
        self._by_type[type(service)] = service
        return service

    def get(self, kind: type[T]) -> T:
        """Return the object of exactly this type. Raises LookupError when the process has none."""
        service = self._by_type.get(kind)
        if not isinstance(service, kind):
            raise LookupError(f"this process holds no {kind.__name__}: is its lifespan running?")
        return service


def services_of(connection: HTTPConnection) -> Services:
    """Return the services of the application that handles this request."""
    services: Services = connection.app.state.services
    return services


def settings_of(connection: HTTPConnection) -> Settings:
    """Return the settings of the application that handles this request."""
    return services_of(connection).get(Settings)


class JsonBody(Generic[T]):
    """A FastAPI dependency that returns the parsed JSON body of a request.

    Args:
        model: The model that OpenAPI shows as the body's schema.
        parse: Returns the parsed body from the JSON value, or raises BadRequest. It may run in a thread.
        max_values: The most values that a body may hold.
        takes_arrays: Whether the body may be a JSON array as well; otherwise it is an object.
    """

    def __init__(
        self, model: type[BaseModel], parse: Callable[[Any], T], max_values: int, *, takes_arrays: bool = False
    ) -> None:
        self.model, self._parse, self._max_values = model, parse, max_values
        self._read = parse_json if takes_arrays else parse_json_object

    async def __call__(self, request: Request) -> T:
        """Raises BadRequest or TooLarge. `request.state.max_body_bytes` is the caller's own limit, if it has one."""
        limit = getattr(request.state, "max_body_bytes", settings_of(request).server.max_body_bytes)
        body = await read_body(request, limit)

        def parse() -> T:
            return self._parse(self._read(body, self._max_values))

        if len(body) <= THREAD_BYTES and _max_count(body) <= THREAD_VALUES:
            return parse()
        return await asyncio.get_running_loop().run_in_executor(PARSER, parse)


def json_body(
    model: type[BaseModel],
    parse: Callable[[Any], Any] | None = None,
    max_values: int = MAX_VALUES,
    *,
    takes_arrays: bool = False,
) -> Any:
    """Return a `Depends` for a body of type `model`; use it inside `Annotated`.

    `parse` replaces the model's own validation, for a union that chooses its model first. With `parse=dict` the route
    receives the JSON object and parses it itself.
    """
    parse = parse or (lambda body: parse_body(model, body))
    return Depends(JsonBody(model, parse, max_values, takes_arrays=takes_arrays))


def parse_json_object(raw: bytes, max_values: int = MAX_VALUES) -> dict[str, object]:
    """Return the body as a JSON object. Raises BadRequest, or TooLarge for one with too many values."""
    body = parse_json(raw, max_values)
    if not isinstance(body, dict):
        raise BadRequest("The body must be a JSON object.", code="invalid_json")
    return body


def parse_json(raw: bytes, max_values: int = MAX_VALUES) -> Any:
    """Return the body as a JSON value, {} for none. Raises BadRequest, or TooLarge for one with too many values.

    orjson refuses NaN, 1e999, lone surrogates and invalid UTF-8. It accepts escaped NUL characters, which PostgreSQL
    cannot store, so they are refused here.
    """
    if _max_count(raw) > max_values and not _holds_at_most(max_values, raw):
        raise TooLarge(f"The body may hold at most {max_values} JSON values; send less at once.")
    try:
        body = orjson.loads(raw or b"{}")
    except orjson.JSONDecodeError as error:
        raise BadRequest(f"The body is not valid JSON: {error}.", code="invalid_json") from error
    _check_depth(body)
    if b"\\u0000" in raw and b"\\u0000" in raw.replace(b"\\\\", b""):  # without escaped backslashes
        raise BadRequest("The body holds a NUL character, which cannot be stored.", code="invalid_json")
    return body


def _max_count(raw: bytes) -> int:
    """Return an upper bound of the number of values in JSON: it counts the separators in texts, too."""
    return raw.count(b",") + raw.count(b"[") + raw.count(b"{")


def _holds_at_most(max_values: int, raw: bytes) -> bool:
    """Return whether JSON holds at most so many values, without parsing it. Texts are skipped."""
    count = end = 0
    for num_texts, text in enumerate(JSON_TEXT.finditer(raw)):
        count += _max_count(raw[end : text.start()])
        if count > max_values or num_texts > 2 * max_values + 2:  # a value is at most a key and a text
            return False
        end = text.end()
    return count + _max_count(raw[end:]) <= max_values


def _check_depth(body: object) -> None:
    """Raise BadRequest for a body that is nested too deeply."""
    containers: list[Any] = [body] if isinstance(body, (dict, list)) else []
    for _ in range(MAX_DEPTH):
        items = (item for each in containers for item in (each.values() if isinstance(each, dict) else each))
        containers = [item for item in items if isinstance(item, (dict, list))]
        if not containers:
            return
    raise BadRequest(f"The body is nested deeper than {MAX_DEPTH} levels.", code="invalid_json")


async def read_body(request: Request, limit: int) -> bytes:
    """Return the body, which is read and decompressed once.

    Raises TooLarge if it holds more than `limit` bytes, compressed or not, and UnsupportedMediaType.
    """
    if not hasattr(request.state, "body"):
        encoding = request.headers.get("content-encoding", "").strip().lower()
        require_known_encoding(encoding)
        body = b"".join([chunk async for chunk in stream_body(request, limit, "body")])
        if encoding in ENCODINGS:
            body = await asyncio.get_running_loop().run_in_executor(PARSER, decompress, body, limit)
        request.state.body = body
    read: bytes = request.state.body
    return read


async def stream_body(request: Request, limit: int, noun: str) -> AsyncIterator[bytes]:
    """Yield the body in parts. Raises TooLarge, which calls it `noun`, as soon as it is known to exceed the limit."""
    too_large = TooLarge(f"The {noun} may hold at most {limit} bytes.")
    announced = request.headers.get("content-length", "0")
    if announced.isdigit() and int(announced) > limit:
        raise too_large
    size = 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > limit:
            raise too_large
        yield chunk


def parse_body(model: type[M], body: Mapping[str, object]) -> M:
    """Validate `body` as `model`. Raises BadRequest, which names the first wrong field."""
    try:
        return model.model_validate(body)
    except ValidationError as error:
        raise validation_error(error, model) from error


def validation_error(error: ValidationError, model: type[BaseModel]) -> BadRequest:
    """Return a BadRequest that names the first wrong field of a body that was validated as `model`."""
    if (count := error.error_count()) > MAX_ERRORS:  # listing them would take long
        return BadRequest(f"The body holds {count} invalid values.", code="invalid_value")
    problem = find_problem(error.errors(include_url=False), model)
    code = "unknown_parameter" if problem.is_unknown_name else "invalid_value"
    return BadRequest(problem.sentence, param=problem.place or None, code=code)


def document_json_bodies(routes: Iterable[BaseRoute]) -> None:
    """Add the schema of each route's `json_body` to its OpenAPI operation; FastAPI sees a plain dependency only."""
    for route in routes:
        if not isinstance(route, APIRoute):
            continue
        for dependency in route.dependant.dependencies:
            if isinstance(dependency.call, JsonBody):
                route.openapi_extra = {**(route.openapi_extra or {}), **_request_body_schema(dependency.call.model)}


def _request_body_schema(model: type[BaseModel]) -> dict[str, object]:
    schema = model.model_json_schema()
    definitions = schema.pop("$defs", {})
    schema = as_object(_inline_refs(schema, definitions))
    return {"requestBody": {"required": _requires_fields(schema), "content": {"application/json": {"schema": schema}}}}


def _requires_fields(schema: Mapping[str, object]) -> bool:
    """Whether an object without fields, as which a missing body is read, does not match the schema."""
    alternatives = [*as_objects(schema.get("oneOf", [])), *as_objects(schema.get("anyOf", []))]
    return "required" in schema or (bool(alternatives) and all(map(_requires_fields, alternatives)))


def _inline_refs(schema: object, definitions: dict[str, object]) -> object:
    if isinstance(schema, list):
        return [_inline_refs(item, definitions) for item in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        return _inline_refs(definitions[schema["$ref"].rpartition("/")[2]], definitions)
    return {key: _inline_refs(value, definitions) for key, value in schema.items() if key != "discriminator"}
