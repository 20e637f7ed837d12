"""Errors: sentences with a status, always in OpenAI's shape.

AttuneError
├── BadRequest            400
│   └── UnsupportedParameter
├── Unauthorized          401
├── Forbidden             403
├── NotFound              404
├── Conflict              409
├── TooLarge              413
├── Unprocessable         422
├── RateLimited           429, with Retry-After
└── Unavailable           503, with Retry-After
"""

import logging
import math
from collections.abc import Mapping
from typing import Any

import orjson
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from sqlalchemy.exc import InterfaceError, InternalError, OperationalError, SQLAlchemyError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.routing import compile_path

log = logging.getLogger("attune.errors")


class AttuneError(Exception):
    status = 500
    type = "server_error"
    code: str | None = None

    def __init__(
        self,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.code = code or self.code
        self.param = param
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        """OpenAI's shape: all four keys, always."""
        return error_body(self.message, type=self.type, param=self.param, code=self.code)


class BadRequest(AttuneError):
    status = 400
    type = "invalid_request_error"


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
    type = "invalid_request_error"
    code = "not_found"


class Conflict(AttuneError):
    status = 409
    type = "invalid_request_error"
    code = "conflict"


class TooLarge(AttuneError):
    status = 413
    type = "invalid_request_error"
    code = "request_too_large"


class Unprocessable(AttuneError):
    status = 422
    type = "invalid_request_error"


class RateLimited(AttuneError):
    status = 429
    type = "rate_limit_error"
    code = "rate_limit_exceeded"

    def __init__(self, message: str, *, retry_after: float) -> None:
        super().__init__(message, headers={"retry-after": str(max(1, math.ceil(retry_after)))})


class Unavailable(AttuneError):
    status = 503
    type = "server_error"
    code = "engine_unavailable"

    def __init__(self, message: str, *, retry_after: int = 2, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(message, headers={"retry-after": str(retry_after), **(headers or {})})


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    error: ErrorDetail


# For OpenAPI: what any route may answer instead of what it is for.
DOCUMENTED: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorBody} for status in (400, 401, 403, 404, 409, 413, 422, 429, 502, 503)
}


def error_body(message: str, *, type: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    return {"error": {"message": message, "type": type, "param": param, "code": code}}


def _allowed(request: Request) -> set[str]:
    """Starlette names the methods of the first route at this address only."""
    known: dict[str, dict[str, Any]] = request.app.openapi()["paths"]
    here = request.url.path
    at = [here] if here in known else [path for path in known if compile_path(path)[0].match(here)]
    return {method.upper() for path in at for method in known[path]}


def render(
    status: int, body: dict[str, Any], headers: Mapping[str, str] | None = None, *, permanent: bool = False
) -> Response:
    headers = dict(headers or {})
    if permanent:  # stock OpenAI clients retry every 5xx and 409 unless told not to
        headers["x-should-retry"] = "false"
    return Response(orjson.dumps(body), status, headers, media_type="application/json")


def install(api: FastAPI) -> None:
    """Every failure leaves through one of these."""

    @api.exception_handler(AttuneError)
    async def attune_error(request: Request, error: AttuneError) -> Response:
        return render(error.status, error.body(), error.headers, permanent=error.status == 409)

    @api.exception_handler(RequestValidationError)
    async def malformed(request: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        param = ".".join(str(part) for part in first["loc"] if part not in ("body", "query", "path", "header"))
        message = f"{param}: {first['msg']}" if param else str(first["msg"])
        return render(400, error_body(message, type="invalid_request_error", param=param or None, code=first["type"]))

    @api.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        if error.status_code == 405:
            error.headers = {"allow": ", ".join(sorted(_allowed(request)))}
        body = error_body(str(error.detail), type="invalid_request_error", code=f"http_{error.status_code}")
        return render(error.status_code, body, error.headers)

    @api.exception_handler(ClientDisconnect)
    async def gone(request: Request, error: ClientDisconnect) -> Response:
        body = error_body("The client left before its request was read.", type="invalid_request_error", code="gone")
        return render(400, body)  # to nobody, but it is not a failure of ours to be logged

    @api.exception_handler(Exception)
    async def bug(request: Request, error: Exception) -> Response:
        body = error_body("Attune failed on this request; the failure is logged.", type="server_error", code="internal")
        headers = {"x-request-id": request.state.request_id}  # this handler answers outside of all middleware
        return render(500, body, headers, permanent=True)

    @api.exception_handler(OperationalError)
    @api.exception_handler(PoolTimeout)
    @api.exception_handler(InterfaceError)
    @api.exception_handler(InternalError)
    async def database_trouble(request: Request, error: SQLAlchemyError) -> Response:
        if isinstance(error, (InterfaceError, InternalError)) and not error.connection_invalidated:
            raise error  # a mistake of ours
        log.warning("the database failed a request: %s", error)
        trouble = Unavailable("The database did not answer in time; nothing is promised. Try again in a moment.")
        trouble.code = "database_unavailable"
        return render(trouble.status, trouble.body(), trouble.headers)
