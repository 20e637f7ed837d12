"""How long PostgreSQL is waited for: what the server is told to give up, and what is given up when it says nothing.

A server, or the network before it, may accept and never answer. Then no time-out of the server's helps, and none of
TCP's either as long as somebody acknowledges the packets: each wait for an answer has an end of its own here.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import psycopg
from sqlalchemy.engine import URL

CONNECT_SECONDS = 3
PING_SECONDS = 1.0
LOCK_SHARE = 0.8  # of a statement's time, so that a lock is named as the cause
IDLE_FACTOR = 3  # a transaction that idles so much longer is ended, and with it the locks of a process that hangs
GRACE_SECONDS = 1.0  # the server's own word comes first: it leaves the connection whole
PATIENT_LOCK_SECONDS = 60  # of those who may take as long as they need
# A host that vanished without a word: 5 s of silence and three probes, or 10 s without an acknowledgement.
KEEPALIVE = {
    "keepalives": 1,
    "keepalives_idle": 5,
    "keepalives_interval": 2,
    "keepalives_count": 3,
    "tcp_user_timeout": 10_000,
}
_UNTIL: ContextVar[float | None] = ContextVar("until", default=None)


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """Whatever is asked of the database in here has that long, all in all."""
    until = time.monotonic() + seconds
    before = _UNTIL.get()
    token = _UNTIL.set(until if before is None else min(until, before))
    try:
        yield
    finally:
        _UNTIL.reset(token)


def arguments(url: URL, seconds: float | None) -> dict[str, Any]:
    """For psycopg's `connect`. Nothing that the URL says itself is said again; its `options` come after ours."""
    told: dict[str, Any] = {"connect_timeout": CONNECT_SECONDS, **KEEPALIVE}
    told = {name: value for name, value in told.items() if name not in url.query}
    theirs = url.query.get("options", "")
    told["options"] = " ".join([_options(seconds), *([theirs] if isinstance(theirs, str) else theirs)]).strip()
    return told


def _options(seconds: float | None) -> str:
    limits = {"lock_timeout": float(PATIENT_LOCK_SECONDS)}
    if seconds is not None:
        limits = {
            "statement_timeout": seconds,
            "lock_timeout": seconds * LOCK_SHARE,
            "idle_in_transaction_session_timeout": seconds * IDLE_FACTOR,
        }
    return " ".join(f"-c {name}={int(limit * 1000)}" for name, limit in limits.items())


def connections(seconds: float | None) -> tuple[type[psycopg.Connection[Any]], type[psycopg.AsyncConnection[Any]]]:
    """Connections, for threads and for tasks, that wait for an answer so long at most. One that was waited for in
    vain is closed: an answer that comes late must not be taken for the next question's."""

    class Bounded(psycopg.Connection[Any]):
        def wait(self, gen: Any, interval: float = 0.1, timeout: float | None = None) -> Any:
            try:
                return super().wait(gen, interval, _left(timeout, seconds))
            except psycopg.errors._WaitTimeout as error:
                raise _silent(self, error) from None

    class BoundedAsync(psycopg.AsyncConnection[Any]):
        async def wait(self, gen: Any, interval: float = 0.1, timeout: float | None = None) -> Any:
            try:
                return await super().wait(gen, interval, _left(timeout, seconds))
            except psycopg.errors._WaitTimeout as error:
                raise _silent(self, error) from None

    return Bounded, BoundedAsync


def _left(asked: float | None, seconds: float | None) -> float | None:
    until = _UNTIL.get()
    ends = [
        asked,
        None if seconds is None else seconds + GRACE_SECONDS,
        None if until is None else max(0.0, until - time.monotonic()),
    ]
    return min((end for end in ends if end is not None), default=None)


def _silent(connection: psycopg.Connection[Any] | psycopg.AsyncConnection[Any], error: Exception) -> Exception:
    connection.pgconn.finish()
    return psycopg.OperationalError("the server did not answer in time; the connection is closed")
