"""Bodies are parsed strictly before anything looks at them: what JSON cannot hold must be a 400, never a 500."""

from collections.abc import Iterator
from typing import Annotated, Any, TypeVar

import orjson
from fastapi import Depends, Request
from pydantic import BaseModel, ValidationError

from app.core.errors import BadRequest, TooLarge
from app.core.services import settings_of

M = TypeVar("M", bound=BaseModel)
MAX_DEPTH = 64


async def json_body(request: Request) -> dict[str, Any]:
    """orjson refuses NaN, 1e999, lone surrogates and broken UTF-8; NUL it lets through, and PostgreSQL would not."""
    try:
        body = orjson.loads(await _read(request) or b"{}")
    except orjson.JSONDecodeError as error:
        raise BadRequest(f"The body is not valid JSON: {error}.", code="invalid_json") from error
    if not isinstance(body, dict):
        raise BadRequest("The body must be a JSON object.", code="invalid_json")
    for text in _strings(body, MAX_DEPTH):
        if "\x00" in text:
            raise BadRequest("The body holds a NUL character, which cannot be stored.", code="invalid_json")
    return body


async def _read(request: Request) -> bytes:
    """The body, refused as soon as it is known to be too large."""
    limit = settings_of(request).max_body_bytes
    announced = request.headers.get("content-length", "0")
    if announced.isdigit() and int(announced) > limit:
        raise TooLarge(f"The body may hold at most {limit} bytes.")
    content = bytearray()
    async for piece in request.stream():
        content += piece
        if len(content) > limit:
            raise TooLarge(f"The body may hold at most {limit} bytes.")
    return bytes(content)


def _strings(value: Any, depth: int) -> Iterator[str]:
    if depth == 0:
        raise BadRequest(f"The body is nested deeper than {MAX_DEPTH} levels.", code="invalid_json")
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield key
            yield from _strings(item, depth - 1)
    elif isinstance(value, list):
        for item in value:
            yield from _strings(item, depth - 1)


JsonBody = Annotated[dict[str, Any], Depends(json_body)]


def parse_body(model: type[M], body: dict[str, Any]) -> M:
    try:
        return model.model_validate(body)
    except ValidationError as error:
        raise validation_error(error) from error


def validation_error(error: ValidationError, tag: int | None = None) -> BadRequest:
    """Names the first field that is wrong. `tag`: the place in its path that holds a union's type and is no place in
    the body. Example: ("sources", 0, "judge", "url") with tag 2 -> "sources.0.url"."""
    first = error.errors(include_url=False, include_context=False)[0]
    param = ".".join(str(part) for at, part in enumerate(first["loc"]) if at != tag)
    code = "unknown_parameter" if first["type"] == "extra_forbidden" else "invalid_value"
    message = f"Unknown parameter: '{param}'." if code == "unknown_parameter" else f"{param}: {first['msg']}"
    return BadRequest(message.removeprefix(": ").replace("Value error, ", ""), param=param or None, code=code)


def request_body_schema(model: type[BaseModel]) -> dict[str, Any]:
    """For a route that reads `JsonBody` and parses it itself: `openapi_extra=accepts(Model)` tells OpenAPI."""
    schema = model.model_json_schema()
    definitions = schema.pop("$defs", {})
    content = {"application/json": {"schema": _inline_refs(schema, definitions)}}
    return {"requestBody": {"required": "required" in schema, "content": content}}


def _inline_refs(schema: Any, definitions: dict[str, Any]) -> Any:
    if isinstance(schema, list):
        return [_inline_refs(item, definitions) for item in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        return _inline_refs(definitions[schema["$ref"].rpartition("/")[2]], definitions)
    return {key: _inline_refs(value, definitions) for key, value in schema.items() if key != "discriminator"}
