"""Errors in Anthropic's form: {"type": "error", "error": {"type", "message"}, "request_id"}."""

from typing import Literal

from pydantic import BaseModel

from app.core.errors import ERROR_RESPONSES, AttuneError

TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
# Agents look for these words before they shorten a conversation.
TOO_LONG = "prompt is too long"


class MessagesErrorDetail(BaseModel):
    type: str
    message: str


class MessagesErrorBody(BaseModel):
    type: Literal["error"]
    error: MessagesErrorDetail
    request_id: str


RESPONSES: dict[int | str, dict[str, object]] = {status: {"model": MessagesErrorBody} for status in ERROR_RESPONSES}


def error_type(status: int) -> str:
    return TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")


def error_body(error: AttuneError, request_id: str) -> dict[str, object]:
    """Return the body of an error response, which is also the event of a stream that fails."""
    is_too_long = error.code == "context_length_exceeded"
    message = f"{TOO_LONG}: {error.message}" if is_too_long else error.message
    return {
        "type": "error",
        "error": {"type": error_type(error.status), "message": message},
        "request_id": request_id,
    }
