"""The database: connections, transactions and the database's clock.

There are two idioms:

1. The hot path (chat turns, feedback, routing) calls `run_read` and `run_write`. The work is a plain function on a Core
   `Connection` and runs in a thread. This costs a fraction of an async session, whose every statement switches between
   tasks, greenlets and (with SQLite) threads.
2. Everything else opens an ORM session: `async with db.read() as session` or `async with db.write() as session`.

In both, the transaction ends where it was opened: services and repositories never commit.
"""

import asyncio
import math
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from contextvars import ContextVar
from functools import cached_property
from typing import Any, TypeVar

from sqlalchemy import Engine, Float, create_engine, event, make_url, select
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.engine import Connection
from sqlalchemy.exc import InvalidatePoolError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, create_async_engine
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.pool import ConnectionPoolEntry, PoolProxiedConnection, QueuePool
from sqlalchemy.sql.compiler import SQLCompiler
from sqlalchemy.sql.expression import FunctionElement

from app.core import db_timeouts, sqlite_database
from app.core.database_errors import close_unusable, hide_values
from app.core.database_url import blocking_url
from app.core.jobs import PENDING_TASKS, TaskName, TaskSender

T = TypeVar("T")
V = TypeVar("V", str, int)
IDLE_SECONDS = 1.0
THREADS = 4
DEFAULT_TIMEOUT_SECONDS = 20.0
LONG_TIMEOUT_SECONDS = 300.0
LONG_POOL_SECONDS = 30.0  # that a long statement waits for a connection
DEADLOCK_STATES = ("40P01", "40001")  # SQLSTATE: the server ended one of two transactions that waited for each other
MAX_ATTEMPTS = 5
# UPDATE and DELETE statements do not change the objects that the session has loaded.
EXECUTION_OPTIONS = {"synchronize_session": False}
# What the current request does first in each of its write transactions; see app/projects/idempotency.py.
REQUEST_WORK: ContextVar[Callable[[AsyncSession], Awaitable[None]] | None] = ContextVar("request_work", default=None)


class now(FunctionElement[float]):  # noqa: N801 - named like the SQL function
    """Seconds since the epoch on the database's clock. Leases use it, so a worker's wrong clock does no harm."""

    type = Float()
    inherit_cache = True


@compiles(now, "sqlite")
def _now_sqlite(element: now, compiler: SQLCompiler, **kw: object) -> str:
    return "((julianday('now') - 2440587.5) * 86400.0)"


@compiles(now, "postgresql")
def _now_postgresql(element: now, compiler: SQLCompiler, **kw: object) -> str:
    # A subquery is evaluated once per statement. A volatile function alone would prevent the use of an index.
    return "(SELECT extract(epoch from clock_timestamp())::double precision)"


async def database_time(session: AsyncSession) -> float:
    """Return the current value of `now`."""
    seconds: float = (await session.execute(select(now()))).scalar_one()
    return seconds


def chunked(values: Collection[V], size: int = 1000) -> Iterator[list[V]]:
    """Yield the sorted values in lists of at most `size`: SQLite limits a statement to 32,766 parameters."""
    ordered = sorted(values)
    return (ordered[start : start + size] for start in range(0, len(ordered), size))


def dialect_insert(session: AsyncSession, table: Any) -> Any:
    """Return an INSERT of this database's dialect, which supports ON CONFLICT."""
    dialect = postgresql if session.get_bind().dialect.name == "postgresql" else sqlite
    return dialect.insert(table)


class Database(AbstractAsyncContextManager["Database"]):
    """The connections of one process to one database. As a context manager it closes them at the end of the block.

    Tasks that a service enqueues on a session or connection (`enqueue_after_commit`) are sent after its commit, and are
    dropped on rollback.

    Args:
        url: A SQLAlchemy URL; `sqlite+aiosqlite` or `postgresql+psycopg`.
        task_sender: Sends the enqueued tasks. Without it they are dropped.
        seconds: The limit of each statement; None for no limit. A statement that takes longer raises OperationalError,
            also when PostgreSQL does not answer at all. A used-up pool, and with SQLite a writer that is not free in
            time, raise PoolTimeout.
        long_seconds: The limit of each statement of `with_long_timeout`.
        primary: The database that this one has the long statements of.
    """

    def __init__(
        self,
        url: str,
        task_sender: TaskSender | None = None,
        *,
        seconds: float | None = DEFAULT_TIMEOUT_SECONDS,
        long_seconds: float = LONG_TIMEOUT_SECONDS,
        primary: "Database | None" = None,
    ) -> None:
        self.embedded = url.startswith("sqlite")
        self._url, self._seconds, self._long_seconds = url, seconds, long_seconds
        self._wait_seconds: float = primary._wait_seconds if primary else seconds or DEFAULT_TIMEOUT_SECONDS
        options: dict[str, object] = {"hide_parameters": True}  # errors are logged, and parameters hold users' messages
        if self.embedded:
            self.engine: AsyncEngine = create_async_engine(url, **options)
            self._sync = create_engine(blocking_url(url), **options)
        else:
            connection_class, async_connection_class = db_timeouts.connection_classes(seconds)
            is_long = seconds is None or primary is not None
            size, overflow = (2, 8) if is_long else (10, 20)  # long statements are few
            pool_timeout = LONG_POOL_SECONDS if is_long else seconds
            options |= {"pool_size": size, "max_overflow": overflow, "pool_timeout": pool_timeout}
            arguments = db_timeouts.connect_arguments(make_url(url), seconds)
            async_arguments = arguments | {"async_creator_fn": async_connection_class.connect}
            self.engine = create_async_engine(url, connect_args=async_arguments, **options)
            self._sync = create_engine(url, connect_args=arguments, **options)

            @event.listens_for(self._sync, "do_connect")
            def connect(dialect: object, record: object, args: tuple[str, ...], kwargs: dict[str, Any]) -> object:
                return connection_class.connect(*args, **kwargs)

        self._writer = self.engine.execution_options(attune_write=True)
        # A read transaction on SQLite sees one state of the database anyway.
        snapshots = {} if self.embedded else {"isolation_level": "REPEATABLE READ"}
        self._snapshots = self.engine.execution_options(**snapshots)
        self._task_sender = task_sender
        self._sqlite_writer: sqlite_database.Writer | None = None
        if self.embedded:
            self._sqlite_writer = primary._sqlite_writer if primary else sqlite_database.Writer()
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="database")
        for engine in (self.engine.sync_engine, self._sync):
            event.listen(engine, "handle_error", close_unusable)
            event.listen(engine, "handle_error", hide_values)
            if self.embedded:
                sqlite_database.prepare(engine, seconds, self._wait_seconds)
            else:
                _ping_when_idle(engine)

    def _session(self, engine: AsyncEngine) -> AsyncSession:
        return AsyncSession(engine, expire_on_commit=False, execution_options=EXECUTION_OPTIONS)

    def read(self) -> AsyncSession:
        """Return a session for reading, an async context manager."""
        return self._session(self.engine)

    def read_snapshot(self) -> AsyncSession:
        """Return a session for reading whose statements all see the database as the first one finds it.

        With `read`, each statement on PostgreSQL also sees what was committed after the statement before it.
        """
        return self._session(self._snapshots)

    @asynccontextmanager
    async def write(self) -> AsyncIterator[AsyncSession]:
        """Open a session in a write transaction, commit it at the end, then send its tasks."""
        async with self._turn(), self._session(self._writer) as session, session.begin():
            if (request_work := REQUEST_WORK.get()) is not None:
                await request_work(session)
            yield session
        self._enqueue(session.info.pop(PENDING_TASKS, []))

    def _turn(self) -> AbstractAsyncContextManager[None]:
        """Wait for the one writer that SQLite has. Raises PoolTimeout if it is not free in time."""
        return nullcontext() if self._sqlite_writer is None else self._sqlite_writer.turn(self._wait_seconds)

    async def retry_on_deadlock(self, work: Callable[[AsyncSession], Awaitable[T]]) -> T:
        """Run `work` in a write transaction; run it again in a new one when the database ended it as a deadlock."""
        for attempt in range(1, MAX_ATTEMPTS + 1):
            try:
                async with self.write() as session:
                    return await work(session)
            except OperationalError as error:
                if getattr(error.orig, "sqlstate", None) not in DEADLOCK_STATES or attempt == MAX_ATTEMPTS:
                    raise
            await asyncio.sleep(random.uniform(0, 0.05) * 2**attempt)
        raise AssertionError

    async def let_others_write(self) -> None:
        """Pause between two steps of work in short transactions: other processes poll for SQLite's writer."""
        if self._sqlite_writer is not None:
            await asyncio.sleep(sqlite_database.PAUSE_SECONDS)

    @cached_property
    def with_long_timeout(self) -> "Database":
        """The same database with a longer statement limit, for exports, imports and erasures.

        It has connections of its own, so that long statements do not use up those of the requests."""
        if self._seconds is None:
            return self
        return Database(self._url, self._task_sender, seconds=self._long_seconds, primary=self)

    async def run_read(self, work: Callable[[Connection], T]) -> T:
        """Run `work` in a thread. It must return plain values and no rows that are still to be fetched."""

        def read() -> T:
            with self._sync.connect() as connection:
                return work(connection)

        return await self._run_in_thread(read)

    async def run_write(self, work: Callable[[Connection], T]) -> T:
        """Run `work` in a thread, in one write transaction. Cancelling the caller does not stop it."""

        def write() -> tuple[T, list[TaskName]]:
            with self._sync.connect().execution_options(attune_write=True) as connection:
                connection.info.pop(PENDING_TASKS, None)
                with connection.begin():
                    result = work(connection)
                return result, connection.info.pop(PENDING_TASKS, [])

        async with self._turn():
            result, tasks = await self._run_in_thread(write)
        self._enqueue(tasks)
        return result

    async def _run_in_thread(self, run: Callable[[], T]) -> T:
        """Run a function in a thread. The time that it waits for a free thread counts towards its limit."""
        seconds = self._seconds
        deadline = math.inf if seconds is None else time.monotonic() + seconds + db_timeouts.GRACE_SECONDS

        def run_until_deadline() -> T:
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                raise PoolTimeout("no database thread became free in time")
            with db_timeouts.time_limit(remaining):
                return run()

        return await asyncio.get_running_loop().run_in_executor(self._threads, run_until_deadline)

    @property
    def num_connections_in_use(self) -> int:
        """How many connections are checked out of the pools at the moment, those of long statements included."""
        pools = [self.engine.sync_engine.pool, self._sync.pool]
        count = sum(pool.checkedout() for pool in pools if isinstance(pool, QueuePool))
        unlimited = self.__dict__.get("with_long_timeout", self)
        return count if unlimited is self else count + unlimited.num_connections_in_use

    def _enqueue(self, tasks: list[TaskName]) -> None:
        if self._task_sender is not None:
            self._task_sender.enqueue(tasks)

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def close(self) -> None:
        if (unlimited := self.__dict__.get("with_long_timeout", self)) is not self:
            await unlimited.close()
        await self.engine.dispose()
        self._threads.shutdown()
        self._sync.dispose()


def _ping_when_idle(engine: Engine) -> None:
    """Ping a connection that was idle before it is used again.

    SQLAlchemy's own ping costs a round trip before every use; a connection in steady use needs none."""

    @event.listens_for(engine, "checkin")
    def checkin(connection: object, record: ConnectionPoolEntry) -> None:
        record.info["idle_since"] = time.monotonic()

    @event.listens_for(engine, "checkout")
    def checkout(connection: PoolProxiedConnection, record: ConnectionPoolEntry, proxy: object) -> None:
        idle_since = record.info.get("idle_since")
        if idle_since is None or time.monotonic() - idle_since < IDLE_SECONDS:
            return
        try:
            with db_timeouts.time_limit(db_timeouts.PING_SECONDS):
                engine.dialect.do_ping(connection)
        except engine.dialect.loaded_dbapi.Error as error:
            raise InvalidatePoolError from error  # the other connections are as old as this one: open new ones
