"""Whose fault it is that a tool call failed: the model's, which the model is shown, or the host's, which it never is.

A failure of the host says nothing about what the model did. As a tool message it would be a part of the episode, and
the model would learn to avoid what is slow or broken today. It is raised instead: the episode ends with the reason
`infrastructure`, and another one takes its place.
"""

import errno
import re
import socket
import sysconfig
import traceback
from collections.abc import Iterator
from pathlib import Path

MAX_MESSAGE_CHARS = 300
QUERY = re.compile(r"(?<=\S)\?[^\s'\")>]*=[^\s'\")>]*")  # of a URL or of a path: it may hold a key
CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
PACKAGES = "site-packages"  # in the path of a file that is installed
NOT_OWN = (str(Path(__file__).parents[1]), sysconfig.get_path("stdlib"), "<")  # beginnings of such paths
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


class EnvironmentFailure(InfrastructureFailure):
    """Code of an environment in another process has raised an error, perhaps since the service refused its chat."""


class AgentFailure(Exception):
    """The agent gave up, or an error of its own stopped it: the episode ends as `failed`, which is learned from."""


class ServiceRefusal(Exception):
    """The service has refused a request. `code` is that of its error, where it has one."""

    def __init__(self, status: int, code: str | None, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code


def describe_error(error: BaseException) -> str:
    """Return the type and the message's first line with a letter or a digit, without what may be a key: queries and
    credentials of URLs.

    Example: "ValueError: no such order"
    """
    lines = [line.strip() for line in str(error).splitlines() if any(map(str.isalnum, line))]
    if not lines:
        return type(error).__name__
    message = CREDENTIALS.sub("", QUERY.sub("?…", lines[0]))
    if len(message) > MAX_MESSAGE_CHARS:
        message = message[:MAX_MESSAGE_CHARS] + " …"
    return f"{type(error).__name__}: {message}"


def describe_with_place(error: BaseException) -> str:
    """Return the same with the last frame of the environment's own code, where it has one.

    Example: "KeyError: 'board' (rooms.py:12 in step)"
    """
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if PACKAGES not in frame.filename and not frame.filename.startswith(NOT_OWN)]
    if not own:
        return describe_error(error)
    return f"{describe_error(error)} ({Path(own[-1].filename).name}:{own[-1].lineno} in {own[-1].name})"


def format_failure(error: BaseException) -> str | None:
    """Return the traceback of code of an environment, also of one in another process, or None for a host's failure."""
    notes: list[str] = getattr(error, "__notes__", [])
    if notes:
        return "\n".join(notes)
    return None if isinstance(error, InfrastructureFailure) else "".join(traceback.format_exception(error))


def printable(text: str) -> str:
    """Return the text without control characters, which would reach the terminal, but with its lines and tabs."""
    return CONTROLS.sub("", text)


def is_host_failure(error: BaseException) -> bool:
    """Return whether the error, or one that it came from, says that a connection was refused or lost."""
    return any(map(_is_of_host, with_causes(error)))


def with_causes(error: BaseException) -> Iterator[BaseException]:
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
