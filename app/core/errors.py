"""Errors of the API: a message and an HTTP status, with a body of OpenAI's form but where a wire has its own.

AttuneError
├── BadRequest            400
│   └── UnsupportedParameter
├── Unauthorized          401
├── Forbidden             403
├── NotFound              404
├── Conflict              409
├── TooLarge              413
├── UnsupportedMediaType  415
├── Unprocessable         422
├── RateLimited           429, with Retry-After
└── Unavailable           503, with Retry-After
"""

import logging
import math
from collections.abc import Callable, Mapping
from typing import TypedDict, TypeVar

import orjson
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from sqlalchemy.exc import InterfaceError, InternalError, NotSupportedError, OperationalError, SQLAlchemyError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.routing import compile_path

from app.core.validation_errors import describe, parameter_name

log = logging.getLogger("attune.errors")
T = TypeVar("T")
PERMANENT = (409, 500)  # stock OpenAI clients retry a 409 and every 5xx unless they are asked not to


class AttuneError(Exception):
    """An error that is sent to the caller.

    Args:
        param: The field of the request that is wrong.
        retry_after: The seconds after which the caller may try again, sent as Retry-After.
    """

    status = 500
    type = "invalid_request_error"
    code: str | None = None
    retry_after: float | None = None

    def __init__(
        self, message: str, *, code: str | None = None, param: str | None = None, retry_after: float | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.code = code or self.code
        self.param = param
        self.headers: dict[str, str] = {}
        if (seconds := retry_after or self.retry_after) is not None:
            self.headers["retry-after"] = str(max(1, math.ceil(seconds)))

    def body(self) -> "ErrorEnvelope":
        """Return the response body."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    def response(self, body: Mapping[str, object] | None = None) -> Response:
        """Return the response. `body`: in another form than OpenAI's."""
        headers = self.headers if self.status not in PERMANENT else {**self.headers, "x-should-retry": "false"}
        return Response(orjson.dumps(body or self.body()), self.status, headers, media_type="application/json")


class BadRequest(AttuneError):
    status = 400


class UnsupportedParameter(BadRequest):
    code = "unsupported_parameter"


class Unauthorized(AttuneError):
    status = 401
    type = "authentication_error"
    code = "invalid_api_key"


class Forbidden(AttuneError):
    status = 403
    type = "permission_error"
    code = "missing_scope"


class NotFound(AttuneError):
    status = 404
    code = "not_found"


def require_row(row: T | None, message: str, *, code: str | None = None, param: str | None = None) -> T:
    """Return the row that a query has found. Raises NotFound with this message if it is None."""
    if row is None:
        raise NotFound(message, code=code, param=param)
    return row


class Conflict(AttuneError):
    status = 409
    code = "conflict"


class TooLarge(AttuneError):
    status = 413
    code = "request_too_large"


class UnsupportedMediaType(AttuneError):
    status = 415
    code = "unsupported_media_type"


class Unprocessable(AttuneError):
    status = 422


class RateLimited(AttuneError):
    status = 429
    type = "rate_limit_error"
    code = "rate_limit_exceeded"


class Unavailable(AttuneError):
    status = 503
    type = "server_error"
    code = "engine_unavailable"
    retry_after = 2


class ErrorFields(TypedDict):
    """An ErrorDetail as a dict."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorEnvelope(TypedDict):
    """An ErrorBody as a dict."""

    error: ErrorFields


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    error: ErrorDetail


# For OpenAPI: the error responses that every route may send.
ERROR_RESPONSES: dict[int | str, dict[str, object]] = {
    status: {"model": ErrorBody} for status in (400, 401, 403, 404, 409, 413, 415, 422, 429, 502, 503)
}


def _allowed_methods(request: Request) -> set[str]:
    """Return the methods of every route at this address; Starlette names those of the first one only."""
    operations: dict[str, dict[str, object]] = request.app.openapi()["paths"]
    address = request.url.path
    paths = [address] if address in operations else [p for p in operations if compile_path(p)[0].match(address)]
    return {method.upper() for path in paths for method in operations[path]}


TAKES_NO_SCORES = "Langfuse's scores are taken here with ATTUNE_LANGFUSE__INTAKE=true (docs/connect/langfuse.md)"
# What a client may use instead of routes of OpenAI that this service lacks.
ALTERNATIVES = {
    "/v1/completions": "send the text as a user's message to POST /v1/chat/completions, or to POST /v1/responses",
    **dict.fromkeys(("/api/public/scores", "/api/public/ingestion", "/api/public/otel/v1/traces"), TAKES_NO_SCORES),
    "/v1/embeddings": "this service generates text only: chats are at POST /v1/chat/completions",
}
MAX_PATH_CHARS = 200


def _unknown_route(request: Request) -> str:
    path = request.url.path.encode(errors="replace").decode()
    instead = ALTERNATIVES.get(path.rstrip("/"), "GET /openapi.json describes the routes that exist")
    return f"There is no route '{request.method} {path[:MAX_PATH_CHARS]}': {instead}."


# Returns an error's body in another form than OpenAI's, from the error and the request's id.
ErrorForm = Callable[[AttuneError, str], dict[str, object]]


def install_error_handlers(api: FastAPI, forms: Mapping[str, ErrorForm] | None = None) -> None:
    """Install the handlers that turn every exception into an error response.

    `forms`: the form of errors at an address and below it, where that is not OpenAI's. Those responses have the header
    `request-id` as well.
    """

    def respond(request: Request, error: AttuneError) -> Response:
        path, id = request.url.path, request.state.request_id
        form = next((form for at, form in (forms or {}).items() if path == at or path.startswith(f"{at}/")), None)
        if form is None:
            return error.response()
        error.headers["request-id"] = id
        return error.response(form(error, id))

    @api.exception_handler(AttuneError)
    async def handle_attune_error(request: Request, error: AttuneError) -> Response:
        return respond(request, error)

    @api.exception_handler(RequestValidationError)
    async def handle_invalid_parameter(request: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        param = parameter_name(first)
        return respond(request, BadRequest(f"{param}: {describe(first)}", param=param, code="invalid_value"))

    @api.exception_handler(HTTPException)
    async def handle_http_error(request: Request, error: HTTPException) -> Response:
        methods = _allowed_methods(request) if error.status_code == 405 else set()
        is_unknown_route = error.status_code == 404 and error.detail == "Not Found"
        if error.status_code == 405 and not methods:  # only a probe of the root is answered there
            error, is_unknown_route = HTTPException(404), True
        message = _unknown_route(request) if is_unknown_route else str(error.detail)
        attune_error = AttuneError(message, code=f"http_{error.status_code}")
        attune_error.status = error.status_code
        if error.status_code == 405:
            attune_error.headers["allow"] = ", ".join(sorted(methods))
        else:
            attune_error.headers |= error.headers or {}
        return respond(request, attune_error)

    @api.exception_handler(ClientDisconnect)
    async def handle_client_disconnect(request: Request, error: ClientDisconnect) -> Response:
        # Nobody reads this response, but the disconnect must not be logged as a failure.
        return BadRequest("The client left before its request was read.", code="gone").response()

    @api.exception_handler(Exception)
    async def handle_unexpected_error(request: Request, error: Exception) -> Response:
        unexpected = AttuneError("Attune failed on this request; the failure is logged.", code="internal")
        unexpected.type = "server_error"
        unexpected.headers["x-request-id"] = request.state.request_id  # this handler runs outside of the middleware
        return respond(request, unexpected)

    @api.exception_handler(OperationalError)
    @api.exception_handler(PoolTimeout)
    @api.exception_handler(InterfaceError)
    @api.exception_handler(InternalError)
    @api.exception_handler(NotSupportedError)
    async def handle_database_error(request: Request, error: SQLAlchemyError) -> Response:
        if not is_database_outage(error):
            raise error  # a programming error
        log.warning("the database failed a request: %s", error)
        return respond(request, database_unavailable())


def is_database_outage(error: BaseException) -> bool:
    """Return whether the database failed, so that the same call may succeed later."""
    if isinstance(error, (InterfaceError, InternalError, NotSupportedError)):
        return error.connection_invalidated
    return isinstance(error, (OperationalError, PoolTimeout))


def database_unavailable() -> Unavailable:
    message = "The database did not answer in time; nothing is promised. Try again in a moment."
    return Unavailable(message, code="database_unavailable")
