"""Errors in Langfuse's form: {"message", "error"}."""

from pydantic import BaseModel

from app.core.errors import ERROR_RESPONSES, AttuneError


class LangfuseError(BaseModel):
    message: str
    error: str


RESPONSES: dict[int | str, dict[str, object]] = {status: {"model": LangfuseError} for status in ERROR_RESPONSES}


def error_body(error: AttuneError, request_id: str) -> dict[str, object]:
    """Return the body of an error response."""
    return {"message": error.message, "error": error.code or error.type}
