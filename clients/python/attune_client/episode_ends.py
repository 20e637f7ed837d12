"""What the error says that leaves the `with` block of an episode: that it had ended, or that infrastructure failed.

The error may come from any client, so those of other packages are known by the names of their classes.
"""

from collections.abc import Iterator
from typing import Literal

from attune_client.errors import ConnectionFailed

Reason = Literal["completed", "failed", "max_turns", "max_tokens", "deadline", "abandoned", "infrastructure"]
ENDED_CODES = frozenset(
    {"episode_ended", "episode_idle_timeout", "episode_deadline", "episode_max_turns", "episode_max_tokens"}
)
ENDED_MESSAGE = "Create another one with POST /v1/episodes."  # Anthropic's errors have no code
OUTAGES = (ConnectionFailed, ConnectionError, TimeoutError)
OUTAGE_NAMES = frozenset(
    {
        "APIConnectionError",  # openai and anthropic; their APITimeoutError is one
        "InternalServerError",
        "ServiceUnavailableError",
        "TransportError",  # httpx: the base of ConnectError, ReadTimeout and others
        "ConnectionError",  # requests
        "Timeout",
        "ClientConnectionError",  # aiohttp
        "ClientPayloadError",
        "gaierror",
        "InfrastructureFailure",  # alignment.environments
    }
)
BUSY_STATUSES = (408, 429)  # like 5xx: the service could not serve the request


def has_ended(error: BaseException) -> bool:
    """Return whether a request was refused since its episode has ended, by a limit or by a report."""
    return any(_status(link) == 409 and _names_end(link) for link in _links(error))


def is_infrastructure(error: BaseException) -> bool:
    """Return whether a connection, a service or the host failed, and not the agent.

    An interruption is none, whatever it has interrupted.
    """
    return isinstance(error, Exception) and any(_is_outage(link) for link in _links(error))


def _is_outage(error: BaseException) -> bool:
    status = _status(error)
    if status in BUSY_STATUSES or (status is not None and 500 <= status < 600):
        return True
    return isinstance(error, OUTAGES) or any(kind.__name__ in OUTAGE_NAMES for kind in type(error).__mro__)


def _names_end(error: BaseException) -> bool:
    return getattr(error, "code", None) in ENDED_CODES or ENDED_MESSAGE in str(error)


def _status(error: BaseException) -> int | None:
    """Return the HTTP status: of attune, openai and anthropic, httpx and requests, or urllib."""
    response = getattr(error, "response", None)
    for owner, name in ((error, "status"), (error, "status_code"), (response, "status_code"), (error, "code")):
        status = getattr(owner, name, None)
        if isinstance(status, int):
            return status
    return None


def _links(error: BaseException) -> Iterator[BaseException]:
    """Yield the error, those that it was raised from or while handling, and those of its group."""
    waiting, seen = [error], set[int]()
    while waiting:
        link = waiting.pop()
        if id(link) in seen:
            continue
        seen.add(id(link))
        yield link
        before = link.__cause__ or (None if link.__suppress_context__ else link.__context__)
        waiting += [*([] if before is None else [before]), *getattr(link, "exceptions", ())]
