"""Records the write transactions of a block on SQLite: what each has cost, in steps of SQLite's virtual machine.

While one of them is open, every vote and every chat waits. So a test that compares the largest one for little and for
much work shows whether these waits grow, without a clock.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import event
from sqlalchemy.engine import Connection

from app.core.database import Database

STEPS = 100  # of SQLite's virtual machine, between two counts


@dataclass
class WriteTransaction:
    """The statements of one transaction, and its cost. The seconds are for benchmarks: tests assert none."""

    began_at: float = field(default_factory=time.perf_counter)
    statements: list[str] = field(default_factory=list)
    steps: int = 0
    seconds: float = 0.0


class WriteTransactions(list[WriteTransaction]):
    """The transactions, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.current: WriteTransaction | None = None

    @property
    def largest(self) -> int:
        """The steps of the largest transaction, in units of STEPS."""
        return max((one.steps for one in self), default=0)

    def count_steps(self) -> int:
        """SQLite calls this after STEPS steps; a result other than 0 would end the statement."""
        if self.current is not None:
            self.current.steps += 1
        return 0


@contextmanager
def record_writes(*databases: Database) -> Iterator[WriteTransactions]:
    """Record the write transactions of these databases of one file: one of them at a time."""
    recorded = WriteTransactions()
    watched: list[Any] = []

    def watch(dbapi_connection: Any, record: Any, proxy: Any) -> None:
        adapted = getattr(dbapi_connection, "driver_connection", dbapi_connection)
        raw = getattr(adapted, "_conn", adapted)
        raw.set_progress_handler(recorded.count_steps, STEPS)
        watched.append(raw)

    def begin(connection: Connection) -> None:
        if connection.get_execution_options().get("attune_write"):
            recorded.current = WriteTransaction()

    def execute(connection: Connection, cursor: Any, statement: str, *args: Any) -> None:
        if recorded.current is not None and connection.get_execution_options().get("attune_write"):
            recorded.current.statements.append(statement)

    def end(connection: Connection) -> None:
        if recorded.current is not None and connection.get_execution_options().get("attune_write"):
            recorded.current.seconds = time.perf_counter() - recorded.current.began_at
            recorded.append(recorded.current)
            recorded.current = None

    engines = [engine for db in databases for engine in (db.engine.sync_engine, db._sync)]
    listeners: list[tuple[str, Callable[..., None]]] = [("checkout", watch), ("begin", begin)]
    listeners += [("before_cursor_execute", execute), ("commit", end), ("rollback", end)]
    for engine in engines:
        for name, listener in listeners:
            event.listen(engine, name, listener)
    try:
        yield recorded
    finally:
        for engine in engines:
            for name, listener in listeners:
                event.remove(engine, name, listener)
        for raw in watched:
            raw.set_progress_handler(None, 0)
