"""The embedded database: its file, its one writer, and the limit of a statement.

SQLite has one writer. Who waits for it within this process queues up; who waits for another process asks again and
again, at most POLL_SECONDS apart. So a process that writes much must stop for PAUSE_SECONDS from time to time, or the
others would hardly ever meet a free moment.
"""

import asyncio
import math
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from sqlalchemy import Engine, event
from sqlalchemy.dialects.sqlite.base import SQLiteCompiler
from sqlalchemy.engine import Connection
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.pool import ConnectionPoolEntry

# secure_delete: what is erased must be gone from the file, too.
PRAGMAS = ("journal_mode=WAL", "synchronous=FULL", "foreign_keys=ON", "secure_delete=ON")
POLL_SECONDS = 0.1  # of SQLite's busy handler
PAUSE_SECONDS = 1.2 * POLL_SECONDS
CHECK_STEPS = 50_000  # of SQLite's virtual machine, between two looks at the clock: a millisecond or two
WAIT_STEP_SECONDS = 0.5  # waits are rounded up, so that a connection's time-out rarely changes
_WAIT_SECONDS: ContextVar[float | None] = ContextVar("wait_seconds", default=None)  # of the transaction that begins


class Writer:
    """The queue of this process for SQLite's one writer.

    Waiting here costs microseconds, waiting for SQLite's lock up to POLL_SECONDS.
    """

    def __init__(self) -> None:
        self._lock = asyncio.Lock()

    @asynccontextmanager
    async def turn(self, seconds: float) -> AsyncIterator[None]:
        """Wait for this process's turn to write, then let the block's transaction wait for other processes.

        Both together wait at most `seconds`. Raises PoolTimeout, or when it is SQLite that says so, OperationalError.
        """
        deadline = time.monotonic() + seconds
        try:
            async with asyncio.timeout(seconds):
                await self._lock.acquire()
        except TimeoutError as error:
            raise PoolTimeout(f"other writers of this process did not end within {seconds:g} s") from error
        token = _WAIT_SECONDS.set(max(0.0, deadline - time.monotonic()))
        try:
            yield
        finally:
            _WAIT_SECONDS.reset(token)
            self._lock.release()


class StatementLimit:
    """Ends a statement of one connection that runs for longer than `seconds`."""

    def __init__(self, seconds: float) -> None:
        self._seconds, self._end = seconds, math.inf

    def begin(self) -> None:
        """Let the limit of a statement begin."""
        self._end = time.monotonic() + self._seconds

    def is_over(self) -> bool:
        """Return whether SQLite must end the statement that runs."""
        return time.monotonic() > self._end


class Compiler(SQLiteCompiler):
    """Names the index that a table is to be read by (`app.core.planner.read_by`), which SQLAlchemy does not do."""

    def get_from_hint_text(self, table: object, text: str | None) -> str | None:
        return text


def make_file_private(path: Path) -> None:
    """Create the file, in a folder that only its owner can enter, or take away the permissions of other users.

    A folder that exists keeps its permissions. A file that exists is not opened: closing it would drop all POSIX locks
    of this process on it, and without SQLite's locks another process may delete the write-ahead log that is in use.
    """
    if not path.parent.exists():
        path.parent.mkdir(0o700, parents=True, exist_ok=True)
    with suppress(FileExistsError):
        os.close(os.open(path, os.O_RDONLY | os.O_CREAT | os.O_EXCL, 0o600))
    if path.stat().st_mode & 0o077:
        with suppress(PermissionError):  # it belongs to another user
            path.chmod(0o600)


def prepare(engine: Engine, seconds: float | None, wait_seconds: float) -> None:
    """Let the engine open private files, begin write transactions as such, and end statements after `seconds`.

    Statements may name the index that a table is read by.

    A transaction waits for another process for at most `wait_seconds`, or for what is left of its turn.
    """

    engine.dialect.statement_compiler = Compiler

    @event.listens_for(engine, "do_connect")
    def do_connect(dialect: object, record: object, args: object, kwargs: object) -> None:
        if (path := engine.url.database) and path != ":memory:" and not path.startswith("file:"):
            make_file_private(Path(path))  # SQLite gives the permissions of the database to its -wal and -shm

    @event.listens_for(engine, "connect")
    def connect(connection: Any, record: ConnectionPoolEntry) -> None:
        connection.isolation_level = None  # transactions are begun below
        cursor = connection.cursor()
        for pragma in PRAGMAS:
            cursor.execute(f"PRAGMA {pragma}")
        cursor.close()
        if seconds is not None:
            limit = record.info["limit"] = StatementLimit(seconds)
            _watch(connection, limit)

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        # A transaction that reads and then writes fails with SQLITE_BUSY_SNAPSHOT, whatever the timeout. So a write
        # transaction is one from its beginning.
        writes = connection.get_execution_options().get("attune_write", False)
        left = _WAIT_SECONDS.get()
        wait = wait_seconds if left is None else WAIT_STEP_SECONDS * math.ceil(left / WAIT_STEP_SECONDS)
        if connection.info.get("wait") != wait:
            connection.exec_driver_sql(f"PRAGMA busy_timeout = {math.ceil(1000 * wait)}")
            connection.info["wait"] = wait
        connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")

    @event.listens_for(engine, "before_cursor_execute")
    def before_execute(connection: Connection, *args: object) -> None:
        if (limit := connection.info.get("limit")) is not None:
            limit.begin()


def _watch(connection: Any, limit: StatementLimit) -> None:
    """Let SQLite ask the limit while a statement runs. `connection` is sqlite3's, or the adapter of aiosqlite's."""
    if hasattr(connection, "run_async"):
        connection.run_async(lambda driver: driver.set_progress_handler(limit.is_over, CHECK_STEPS))
    else:
        connection.set_progress_handler(limit.is_over, CHECK_STEPS)
