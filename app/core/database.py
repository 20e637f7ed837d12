"""The database: one engine, read and write transactions, the database's clock."""

import asyncio
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from functools import cached_property
from typing import Any, TypeVar

from sqlalchemy import Engine, Float, create_engine, event, make_url, select
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.engine import Connection
from sqlalchemy.exc import InvalidatePoolError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, create_async_engine
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.compiler import SQLCompiler
from sqlalchemy.sql.expression import FunctionElement

from app.core import db_timeouts
from app.core.jobs import PENDING_TASKS, TaskName, TaskSender

T = TypeVar("T")
R = TypeVar("R")
IDLE_SECONDS = 1.0
# What is erased must be gone from the file, too.
PRAGMAS = ("journal_mode=WAL", "synchronous=FULL", "foreign_keys=ON", "busy_timeout=15000", "secure_delete=ON")
THREADS = 4
JOB_SECONDS = 20.0
DEADLOCK = ("40P01", "40001")  # one of two transactions that waited for each other was ended
ATTEMPTS = 5


class now(FunctionElement[float]):  # noqa: N801 - reads as the SQL function it is
    """Seconds since the epoch on the database's clock, so that leases never trust a worker's."""

    type = Float()
    inherit_cache = True


@compiles(now, "sqlite")
def _now_sqlite(element: now, compiler: SQLCompiler, **kw: Any) -> str:
    return "((julianday('now') - 2440587.5) * 86400.0)"


@compiles(now, "postgresql")
def _now_postgresql(element: now, compiler: SQLCompiler, **kw: Any) -> str:
    # As a subquery it is asked once a statement: a volatile function itself may not be looked up in an index.
    return "(SELECT extract(epoch from clock_timestamp())::double precision)"


async def database_time(session: AsyncSession) -> float:
    """The moment, as `now` tells it."""
    told: float = (await session.execute(select(now()))).scalar_one()
    return told


def dialect_insert(session: AsyncSession, table: Any) -> Any:
    """An INSERT that can be told what to do on a conflict, in this database's own dialect."""
    dialect = postgresql if session.get_bind().dialect.name == "postgresql" else sqlite
    return dialect.insert(table)


class Database:
    """Transactions close at the edge: callers write `async with db.write() as session`, services never commit.

    What every chat and every thumb needs goes another way, `look` and `change`: below the ORM, in a thread. It costs
    a fraction of an async session, whose every statement hops between tasks, greenlets and (in SQLite) threads.

    Nudges that a service leaves on a session or connection ring after its commit, and are forgotten on rollback.

    `seconds` bounds each statement on PostgreSQL, whoever keeps it waiting; None bounds none. What takes longer
    raises OperationalError, and so does a server that says nothing at all; a pool used up raises PoolTimeout.
    """

    def __init__(self, url: str, task_sender: TaskSender | None = None, *, seconds: float | None = JOB_SECONDS) -> None:
        self.embedded = url.startswith("sqlite")
        self._url, self._seconds = url, None if self.embedded else seconds
        options: dict[str, Any] = {"hide_parameters": True}  # in errors, which are logged: they hold what people said
        if self.embedded:
            self.engine: AsyncEngine = create_async_engine(url, **options)
            self._sync = create_engine(url.replace("+aiosqlite", ""), **options)
        else:
            threaded, tasked = db_timeouts.connections(seconds)
            size, more = (10, 20) if seconds is not None else (2, 8)  # whoever takes long is one of a few
            options |= {"pool_size": size, "max_overflow": more, "pool_timeout": seconds or 30.0}
            told = db_timeouts.arguments(make_url(url), seconds)
            self.engine = create_async_engine(url, connect_args=told | {"async_creator_fn": tasked.connect}, **options)
            self._sync = create_engine(url, connect_args=told, **options)
            event.listen(self._sync, "do_connect", lambda dialect, record, args, more: threaded.connect(*args, **more))
        self._reader = self.engine
        self._writer = self.engine.execution_options(attune_write=True)
        self._task_sender = task_sender
        # SQLite has one writer: waiting in line here costs microseconds, in SQLite's busy handler up to 100 ms.
        self._write_lock = asyncio.Lock()
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="database")
        for engine in (self.engine.sync_engine, self._sync):
            if self.embedded:
                _prepare_sqlite(engine)
            else:
                _ping_when_idle(engine)

    @asynccontextmanager
    async def read(self) -> AsyncIterator[AsyncSession]:
        async with AsyncSession(self._reader, expire_on_commit=False) as session:
            yield session

    @asynccontextmanager
    async def write(self) -> AsyncIterator[AsyncSession]:
        async with AsyncExitStack() as stack:
            if self.embedded:
                await stack.enter_async_context(self._write_lock)
            session = await stack.enter_async_context(AsyncSession(self._writer, expire_on_commit=False))
            await stack.enter_async_context(session.begin())
            yield session
        self._enqueue(session.info.pop(PENDING_TASKS, []))

    async def retry_on_deadlock(self, work: Callable[[AsyncSession], Awaitable[T]]) -> T:
        """One write transaction; a fresh one when the database ended it to let another go on."""
        for attempt in range(1, ATTEMPTS + 1):
            try:
                async with self.write() as session:
                    return await work(session)
            except OperationalError as error:
                if getattr(error.orig, "sqlstate", None) not in DEADLOCK or attempt == ATTEMPTS:
                    raise
            await asyncio.sleep(random.uniform(0, 0.05) * 2**attempt)
        raise AssertionError

    @cached_property
    def without_timeout(self) -> "Database":
        """The same for what may take long: exports, imports, erasures. On connections of its own, so that requests
        find theirs free."""
        return self if self._seconds is None else Database(self._url, self._task_sender, seconds=None)

    async def run_read(self, work: Callable[[Connection], T]) -> T:
        """Reads in a thread. `work` must return plain values, no rows that are still to be fetched."""
        return await asyncio.get_running_loop().run_in_executor(
            self._threads, self._run_until, self._read_in_thread, work, self._deadline()
        )

    async def run_write(self, work: Callable[[Connection], T]) -> T:
        """One write transaction in a thread. A caller that is cancelled does not stop it."""
        async with AsyncExitStack() as stack:
            if self.embedded:
                await stack.enter_async_context(self._write_lock)
            loop = asyncio.get_running_loop()
            result, nudges = await loop.run_in_executor(
                self._threads, self._run_until, self._write_in_thread, work, self._deadline()
            )
        self._enqueue(nudges)
        return result

    def _deadline(self) -> float | None:
        return None if self._seconds is None else time.monotonic() + self._seconds + db_timeouts.GRACE_SECONDS

    def _run_until(
        self, run: Callable[[Callable[[Connection], T]], R], work: Callable[[Connection], T], end: float | None
    ) -> R:
        """In the thread. The time in line for it counts."""
        if end is None:
            return run(work)
        left = end - time.monotonic()
        if left <= 0:
            raise PoolTimeout("every thread waited for the database all the time")
        with db_timeouts.within(left):
            return run(work)

    def _read_in_thread(self, work: Callable[[Connection], T]) -> T:
        with self._sync.connect() as connection:
            return work(connection)

    def _write_in_thread(self, work: Callable[[Connection], T]) -> tuple[T, list[TaskName]]:
        with self._sync.connect().execution_options(attune_write=True) as connection:
            connection.info.pop(PENDING_TASKS, None)
            with connection.begin():
                result = work(connection)
            return result, connection.info.pop(PENDING_TASKS, [])

    def _enqueue(self, stations: list[TaskName]) -> None:
        if self._task_sender is not None:
            self._task_sender.enqueue(stations)

    async def close(self) -> None:
        if (patient := self.__dict__.get("patient", self)) is not self:
            await patient.close()
        await self.engine.dispose()
        self._threads.shutdown()
        self._sync.dispose()


def _ping_when_idle(engine: Engine) -> None:
    """SQLAlchemy's own ping before every use costs a round trip each time; a connection in steady use needs none."""

    @event.listens_for(engine, "checkin")
    def checkin(connection: Any, record: Any) -> None:
        record.info["idle_since"] = time.monotonic()

    @event.listens_for(engine, "checkout")
    def checkout(connection: Any, record: Any, proxy: Any) -> None:
        idle_since = record.info.get("idle_since")
        if idle_since is None or time.monotonic() - idle_since < IDLE_SECONDS:
            return
        try:
            with db_timeouts.within(db_timeouts.PING_SECONDS):
                engine.dialect.do_ping(connection)
        except engine.dialect.loaded_dbapi.Error as error:
            raise InvalidatePoolError from error  # the others are as old as this one: the pool opens fresh ones


def _prepare_sqlite(engine: Engine) -> None:
    @event.listens_for(engine, "connect")
    def connect(connection: Any, record: Any) -> None:
        connection.isolation_level = None  # we begin transactions ourselves, below
        cursor = connection.cursor()
        for pragma in PRAGMAS:
            cursor.execute(f"PRAGMA {pragma}")
        cursor.close()

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        # A read that later writes fails at once with SQLITE_BUSY_SNAPSHOT, whatever the time-out: writers say so first.
        writes = connection.get_execution_options().get("attune_write", False)
        connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")
