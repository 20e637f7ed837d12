"""Whose fault it is that a tool call failed: the model's, which the model is shown, or the host's, which it never is.

A failure of the host says nothing about what the model did. As a tool message it would be a part of the episode, and
the model would learn to avoid what is slow or broken today. It is raised instead: the episode is abandoned and another
one takes its place.
"""

import socket


class ToolError(Exception):
    """The model's mistake, or a refusal that it should see: the message becomes the tool's result."""


class InfrastructureFailure(Exception):
    """A failure of the host: a sandbox, a service or a server of tools is missing, has died or refuses connections.

    The episode cannot go on, and must count neither as a reward nor in a baseline.
    """


def describe_error(error: BaseException) -> str:
    """Return the type and the message. Example: "ValueError: no such order" """
    message = str(error)
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


def is_host_failure(error: BaseException) -> bool:
    """Return whether the error, or one that it was raised from, says that a connection was refused or lost."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, InfrastructureFailure | ConnectionError | socket.gaierror):
            return True
        seen = seen.__cause__
    return False
