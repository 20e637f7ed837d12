"""Log lines of every process: text, or JSON objects, with the ids of what they are about.

The API's lines name their request; lines about a chat also name its turn, policy and version, and those of the workers
the job, batch or version that they work on. No line holds a prompt or a reply.
"""

import json
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime
from logging.config import dictConfig
from types import MappingProxyType
from typing import Literal

REQUEST_ID: ContextVar[str | None] = ContextVar("request_id", default=None)
_FIELDS: ContextVar[Mapping[str, str]] = ContextVar("log_fields", default=MappingProxyType({}))
LogFormat = Literal["text", "json"]


def add_log_fields(**fields: str) -> None:
    """Add fields to the JSON lines that the current task, and those that it starts from now on, cause."""
    _FIELDS.set({**_FIELDS.get(), **fields})


@contextmanager
def log_fields(**fields: str) -> Iterator[None]:
    """Add fields to the JSON lines of a block."""
    token = _FIELDS.set({**_FIELDS.get(), **fields})
    try:
        yield
    finally:
        _FIELDS.reset(token)


class RequestLogFormatter(logging.Formatter):
    """Appends `request_id=req-9f2c…`, the header x-request-id of the response, to lines that a request causes."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        line, request_id = super().formatMessage(record), REQUEST_ID.get()
        return line if request_id is None else f"{line} request_id={request_id}"


class JsonLogFormatter(logging.Formatter):
    """Writes a line as one JSON object: time (UTC), level, logger, role, message, and the fields that are known.

    The fields: request_id, turn, policy, version, job, batch. `traceback` is there for errors.

    Args:
        role: The role of this process, such as "api".
    """

    def __init__(self, role: str) -> None:
        super().__init__()
        self._role = role

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "role": self._role,
            "message": record.getMessage(),
        }
        if (request_id := REQUEST_ID.get()) is not None:
            line["request_id"] = request_id
        line |= _FIELDS.get()
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


def log_config(log_format: LogFormat, role: str, level: str = "WARNING") -> dict[str, object]:
    """Return a configuration for `logging.config.dictConfig` that writes to the standard error.

    The loggers of uvicorn have no handlers of their own with it.
    """
    formatter = {"()": JsonLogFormatter, "role": role} if log_format == "json" else {"()": RequestLogFormatter}
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"line": formatter},
        "handlers": {"stderr": {"class": "logging.StreamHandler", "formatter": "line"}},
        "root": {"handlers": ["stderr"], "level": level},
    }


def configure_logging(log_format: LogFormat, role: str, level: str = "WARNING") -> None:
    """Configure the logging of this process."""
    dictConfig(log_config(log_format, role, level))
