"""Whose fault it is that a tool call failed: the model's, which the model is shown, or the host's, which it never is.

A failure of the host says nothing about what the model did. As a tool message it would be a part of the episode, and
the model would learn to avoid what is slow or broken today. It is raised instead: the episode ends with the reason
`infrastructure`, and another one takes its place.
"""

import errno
import re
import socket
from collections.abc import Iterator

MAX_MESSAGE_CHARS = 300
QUERY = re.compile(r"(?<=\S)\?[^\s'\")>]*=[^\s'\")>]*")  # of a URL or of a path: it may hold a key
CREDENTIALS = re.compile(r"(?<=://)[^\s/@]+@")
CONNECTION_ERRNOS = frozenset(
    {
        *(errno.ECONNREFUSED, errno.ECONNRESET, errno.ECONNABORTED, errno.EPIPE, errno.ETIMEDOUT),
        *(errno.EHOSTUNREACH, errno.EHOSTDOWN, errno.ENETUNREACH, errno.ENETDOWN, errno.ENETRESET, errno.ENOTCONN),
    }
)
# Errors of clients that this package does not import, by package and class. Their base classes count, too.
CLIENT_ERRORS = frozenset(
    {
        *(("requests", "ConnectionError"), ("requests", "ConnectTimeout")),
        *(("urllib3", "NewConnectionError"), ("urllib3", "ConnectTimeoutError"), ("urllib3", "ProtocolError")),
        *((name, kind) for name in ("httpx", "httpx2") for kind in ("NetworkError", "ConnectTimeout", "ProxyError")),
        *((name, "RemoteProtocolError") for name in ("httpx", "httpx2")),
        *((name, kind) for name in ("httpcore", "httpcore2") for kind in ("NetworkError", "ConnectTimeout")),
        *(("aiohttp", "ClientConnectionError"), ("aiohttp", "ClientConnectorError")),
    }
)


class ToolError(Exception):
    """The model's mistake, or a refusal that it should see: the message becomes the tool's result."""


class InfrastructureFailure(Exception):
    """A failure of the host: a sandbox, a service or a server of tools is missing, has died or refuses connections.

    The episode cannot go on, and must count neither as a reward nor in a baseline.
    """


class AgentFailure(Exception):
    """The agent gave up, or an error of its own stopped it: the episode ends as `failed`, which is learned from."""


class ServiceRefusal(Exception):
    """The service has refused a request. `code` is that of its error, where it has one."""

    def __init__(self, status: int, code: str | None, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code


def describe_error(error: BaseException) -> str:
    """Return the type and the message's first line, without what may be a key: queries and credentials of URLs.

    Example: "ValueError: no such order"
    """
    lines = str(error).strip().splitlines()
    if not lines:
        return type(error).__name__
    message = CREDENTIALS.sub("", QUERY.sub("?…", lines[0]))
    if len(message) > MAX_MESSAGE_CHARS:
        message = message[:MAX_MESSAGE_CHARS] + " …"
    return f"{type(error).__name__}: {message}"


def is_host_failure(error: BaseException) -> bool:
    """Return whether the error, or one that it came from, says that a connection was refused or lost."""
    return any(map(_is_of_host, _with_causes(error)))


def _with_causes(error: BaseException) -> Iterator[BaseException]:
    """Yield the error, what it was raised from or while handling, and the members of groups."""
    seen: set[int] = set()
    waiting: list[object] = [error]
    while waiting:
        one = waiting.pop()
        if not isinstance(one, BaseException) or id(one) in seen:
            continue
        seen.add(id(one))
        yield one
        # `reason` is urllib's and urllib3's way to hold the cause.
        waiting += [one.__cause__, None if one.__suppress_context__ else one.__context__, getattr(one, "reason", None)]
        if isinstance(one, BaseExceptionGroup):
            waiting += one.exceptions


def _is_of_host(error: BaseException) -> bool:
    if isinstance(error, InfrastructureFailure | ConnectionError | socket.gaierror):
        return True
    if isinstance(error, OSError) and error.errno in CONNECTION_ERRNOS:
        return True
    return any((kind.__module__.partition(".")[0], kind.__name__) in CLIENT_ERRORS for kind in type(error).__mro__)
