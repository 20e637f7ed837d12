"""The database: one engine, read and write transactions, the database's clock."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, TypeVar

from sqlalchemy import Engine, Float, create_engine, event
from sqlalchemy.engine import Connection
from sqlalchemy.exc import DisconnectionError
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, create_async_engine
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.compiler import SQLCompiler
from sqlalchemy.sql.expression import FunctionElement

from app.jobs import NUDGES, Bell, Station

T = TypeVar("T")
IDLE_SECONDS = 1.0
THREADS = 4


class now(FunctionElement[float]):  # noqa: N801 - reads as the SQL function it is
    """Seconds since the epoch on the database's clock, so that leases never trust a worker's."""

    type = Float()
    inherit_cache = True


@compiles(now, "sqlite")
def _now_sqlite(element: now, compiler: SQLCompiler, **kw: Any) -> str:
    return "((julianday('now') - 2440587.5) * 86400.0)"


@compiles(now, "postgresql")
def _now_postgresql(element: now, compiler: SQLCompiler, **kw: Any) -> str:
    return "extract(epoch from clock_timestamp())::double precision"


class Database:
    """Transactions close at the edge: callers write `async with db.write() as session`, services never commit.

    What every chat and every thumb needs goes another way, `look` and `change`: below the ORM, in a thread. It costs
    a fraction of an async session, whose every statement hops between tasks, greenlets and (in SQLite) threads.

    Nudges that a service leaves on a session or connection ring after its commit, and are forgotten on rollback.
    """

    def __init__(self, url: str, bell: Bell | None = None) -> None:
        self.embedded = url.startswith("sqlite")
        options: dict[str, Any] = {} if self.embedded else {"pool_size": 10, "max_overflow": 20}
        self.engine: AsyncEngine = create_async_engine(url, **options)
        self._sync = create_engine(url.replace("+aiosqlite", ""), **options)
        self._reader = self.engine
        self._writer = self.engine.execution_options(attune_write=True)
        self._bell = bell
        # SQLite has one writer: waiting in line here costs microseconds, in SQLite's busy handler up to 100 ms.
        self._line = asyncio.Lock()
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
                await stack.enter_async_context(self._line)
            session = await stack.enter_async_context(AsyncSession(self._writer, expire_on_commit=False))
            await stack.enter_async_context(session.begin())
            yield session
        self._ring(session.info.pop(NUDGES, []))

    async def look(self, work: Callable[[Connection], T]) -> T:
        """Reads in a thread. `work` must return plain values, no rows that are still to be fetched."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._look, work)

    async def change(self, work: Callable[[Connection], T]) -> T:
        """One write transaction in a thread. A caller that is cancelled does not stop it."""
        async with AsyncExitStack() as stack:
            if self.embedded:
                await stack.enter_async_context(self._line)
            doing = asyncio.get_running_loop().run_in_executor(self._threads, self._change, work)
            result, nudges = await doing
        self._ring(nudges)
        return result

    def _look(self, work: Callable[[Connection], T]) -> T:
        with self._sync.connect() as connection:
            return work(connection)

    def _change(self, work: Callable[[Connection], T]) -> tuple[T, list[Station]]:
        with self._sync.connect().execution_options(attune_write=True) as connection:
            connection.info.pop(NUDGES, None)
            with connection.begin():
                result = work(connection)
            return result, connection.info.pop(NUDGES, [])

    def _ring(self, stations: list[Station]) -> None:
        if self._bell is not None:
            self._bell.ring(stations)

    async def close(self) -> None:
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
            engine.dialect.do_ping(connection)
        except engine.dialect.loaded_dbapi.Error as error:
            raise DisconnectionError from error  # the pool opens a fresh one


def _prepare_sqlite(engine: Engine) -> None:
    @event.listens_for(engine, "connect")
    def connect(connection: Any, record: Any) -> None:
        connection.isolation_level = None  # we begin transactions ourselves, below
        cursor = connection.cursor()
        for pragma in ("journal_mode=WAL", "synchronous=FULL", "foreign_keys=ON", "busy_timeout=15000"):
            cursor.execute(f"PRAGMA {pragma}")
        cursor.close()

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        # A read that later writes fails at once with SQLITE_BUSY_SNAPSHOT, whatever the time-out: writers say so first.
        writes = connection.get_execution_options().get("attune_write", False)
        connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")
