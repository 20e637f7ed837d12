"""Timeouts of PostgreSQL connections: those of the server, and those of the client.

A server, or the network before it, may accept a statement and never answer. Then no timeout of the server helps, nor of
TCP as long as the packets are acknowledged. So every wait for an answer ends on the client, too.
"""

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from sqlalchemy.engine import URL

if TYPE_CHECKING:
    import psycopg

CONNECT_SECONDS = 3
PING_SECONDS = 1.0
LOCK_SHARE = 0.8  # of a statement's limit: the error then names the lock as the cause
IDLE_FACTOR = 3  # a transaction idle for so many limits is ended, which frees the locks of a process that hangs
GRACE_SECONDS = 1.0  # the client waits longer than the server, whose timeout leaves the connection usable
MAX_LOCK_SECONDS = 60  # also of statements with a longer limit, or without one
# A host that has vanished is noticed after 5 s of silence and three probes, or 10 s without an acknowledgement.
KEEPALIVE = {
    "keepalives": 1,
    "keepalives_idle": 5,
    "keepalives_interval": 2,
    "keepalives_count": 3,
    "tcp_user_timeout": 10_000,
}
_DEADLINE: ContextVar[float] = ContextVar("deadline", default=math.inf)


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Limit all database calls of this block together to `seconds`. A nested block can only shorten the limit."""
    token = _DEADLINE.set(min(_DEADLINE.get(), time.monotonic() + seconds))
    try:
        yield
    finally:
        _DEADLINE.reset(token)


def connect_arguments(url: URL, seconds: float | None) -> dict[str, object]:
    """Return the arguments of psycopg's `connect`. Parameters of the URL win; its `options` follow ours."""
    defaults: dict[str, object] = {"connect_timeout": CONNECT_SECONDS, **KEEPALIVE}
    arguments = {name: value for name, value in defaults.items() if name not in url.query}
    limits: dict[str, float] = {"lock_timeout": MAX_LOCK_SECONDS}
    if seconds is not None:
        limits = {
            "statement_timeout": seconds,
            "lock_timeout": min(seconds * LOCK_SHARE, MAX_LOCK_SECONDS),
            "idle_in_transaction_session_timeout": seconds * IDLE_FACTOR,
        }
    # No statement runs for as long as its compilation may take: seconds, for those that read outcomes of feedback.
    options = ["-c jit=off", *(f"-c {name}={int(limit * 1000)}" for name, limit in limits.items())]
    return arguments | {"options": " ".join([*options, *url.normalized_query.get("options", ())])}


def connection_classes(
    seconds: float | None,
) -> "tuple[type[psycopg.Connection[Any]], type[psycopg.AsyncConnection[Any]]]":
    """Return a connection class for threads and one for tasks, which wait at most `seconds` for an answer.

    A connection whose answer did not come in time is closed: a late answer must not be read as the next one.
    """
    import psycopg  # an optional dependency

    class TimeLimitedConnection(psycopg.Connection[Any]):
        def wait(self, gen: Any, interval: float = 0.1, timeout: float | None = None) -> Any:
            try:
                return super().wait(gen, interval, _shortest_timeout(timeout, seconds))
            except psycopg.errors._WaitTimeout as error:
                raise _close_silent(self, error) from None

    class TimeLimitedAsyncConnection(psycopg.AsyncConnection[Any]):
        async def wait(self, gen: Any, interval: float = 0.1, timeout: float | None = None) -> Any:
            try:
                return await super().wait(gen, interval, _shortest_timeout(timeout, seconds))
            except psycopg.errors._WaitTimeout as error:
                raise _close_silent(self, error) from None

    return TimeLimitedConnection, TimeLimitedAsyncConnection


def _shortest_timeout(timeout: float | None, seconds: float | None) -> float | None:
    limits = [timeout, None if seconds is None else seconds + GRACE_SECONDS]
    remaining = max(0.0, _DEADLINE.get() - time.monotonic())
    shortest = min([remaining, *(limit for limit in limits if limit is not None)])
    return None if shortest == math.inf else shortest


def _close_silent(connection: "psycopg.Connection[Any] | psycopg.AsyncConnection[Any]", error: Exception) -> Exception:
    import psycopg

    connection.pgconn.finish()
    return psycopg.OperationalError("the server did not answer in time; the connection is closed")
