"""Errors of the client. Every error of the API carries its code, message and request id.

AttuneError
├── ConnectionFailed          no response: the server is away, or the connection broke
│   └── TimedOut
├── QueueFull                 the offline queue holds as much as it may
├── NotDelivered              `flush` ended before the queue was empty
├── WebhookVerificationFailed
└── APIError                  the server refused: status, code, message, param, type, request_id
    ├── BadRequest            400
    ├── Unauthorized          401
    ├── Forbidden             403
    ├── NotFound              404
    ├── Conflict              409
    ├── TooLarge              413
    ├── Unprocessable         422, such as an id that was used before with another body
    ├── RateLimited           429
    └── ServerError           500 and above
"""

import math
from collections.abc import Mapping
from typing import Any

import httpx


class AttuneError(Exception):
    """The base of all errors of this package."""

    should_retry = False
    retry_after: float | None = None  # seconds


class ConnectionFailed(AttuneError):
    """The server did not respond."""

    should_retry = True


class TimedOut(ConnectionFailed):
    """The server did not respond in time."""


class QueueFull(AttuneError):
    """The offline queue holds `max_items`."""


class NotDelivered(AttuneError):
    """The time of `flush` is over. `pending` pieces of feedback stay in the queue; `__cause__` is the last failure."""

    def __init__(self, message: str, pending: int) -> None:
        super().__init__(message)
        self.pending = pending


class WebhookVerificationFailed(AttuneError):
    """The signature, the time or a header of a webhook is wrong."""


class APIError(AttuneError):
    """An error response of the API. `request_id` names the request in the server's log."""

    def __init__(
        self,
        message: str,
        *,
        status: int,
        code: str | None = None,
        param: str | None = None,
        type: str | None = None,
        request_id: str | None = None,
        retry_after: float | None = None,
        should_retry: bool = False,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.code = code
        self.param = param
        self.type = type
        self.request_id = request_id
        self.retry_after = retry_after
        self.should_retry = should_retry

    def __str__(self) -> str:
        request = f", request {self.request_id}" if self.request_id else ""
        return f"{self.message} ({self.status} {self.code or self.type or 'error'}{request})"


class BadRequest(APIError):
    pass


class Unauthorized(APIError):
    pass


class Forbidden(APIError):
    pass


class NotFound(APIError):
    pass


class Conflict(APIError):
    pass


class TooLarge(APIError):
    pass


class Unprocessable(APIError):
    pass


class RateLimited(APIError):
    pass


class ServerError(APIError):
    pass


BY_STATUS: dict[int, type[APIError]] = {
    400: BadRequest,
    401: Unauthorized,
    403: Forbidden,
    404: NotFound,
    409: Conflict,
    413: TooLarge,
    422: Unprocessable,
    429: RateLimited,
}


def connection_error(error: httpx.TransportError) -> ConnectionFailed:
    kind = TimedOut if isinstance(error, httpx.TimeoutException) else ConnectionFailed
    return kind(f"Attune did not respond: {error or type(error).__name__}")


def response_error(response: httpx.Response) -> APIError:
    """Return the error of a response whose body has been read. A proxy's error page becomes an error as well."""
    try:
        body = response.json()
    except ValueError:
        body = None
    return error_of(body, response.status_code, response.headers)


def error_of(body: Any, status: int, headers: Mapping[str, str]) -> APIError:
    """Return the error for an error body of the API, of a response, an item of a batch or an event of a stream."""
    error = body.get("error") if isinstance(body, dict) else None
    detail: dict[str, Any] = error if isinstance(error, dict) else {}
    kind = BY_STATUS.get(status, ServerError if status >= 500 else APIError)
    asks = headers.get("x-should-retry", "")
    retryable = status in (408, 429) or status >= 500
    return kind(
        str(detail.get("message") or f"The server answered {status}."),
        status=status,
        code=detail.get("code"),
        param=detail.get("param"),
        type=detail.get("type"),
        request_id=headers.get("x-request-id"),
        retry_after=_parse_retry_after(headers.get("retry-after")),
        should_retry=asks == "true" or (retryable and asks != "false"),
    )


def _parse_retry_after(value: str | None) -> float | None:
    """Return the seconds of a Retry-After header. A date is not used by Attune, and is ignored."""
    try:
        seconds = float(value or "")
    except ValueError:
        return None
    return seconds if math.isfinite(seconds) and seconds >= 0 else None
