"""Counts what the database does for statements, without a clock: SQLite's steps, or the rows that PostgreSQL's plans
handle."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import psycopg
from sqlalchemy import event

from app.core.database import Database

STEPS = 20  # of SQLite's virtual machine, between two counts


class StatementWork:
    """The work of the statements of a block, in a unit of the database's own: compare it with that of another block."""

    def __init__(self) -> None:
        self.amount = 0

    def add_steps(self) -> int:
        """SQLite calls this after STEPS steps; a result other than 0 would end the statement."""
        self.amount += 1
        return 0


@asynccontextmanager
async def count_work(db: Database) -> AsyncIterator[StatementWork]:
    """Count the work of the statements that the block runs on `db`. Nothing else may run on it meanwhile."""
    work = StatementWork()
    if db.embedded:
        connections: list[Any] = []

        def watch(dbapi_connection: Any, record: Any, proxy: Any) -> None:
            adapted = getattr(dbapi_connection, "driver_connection", dbapi_connection)
            raw = getattr(adapted, "_conn", adapted)
            raw.set_progress_handler(work.add_steps, STEPS)
            connections.append(raw)

        engines = (db.engine.sync_engine, db._sync)
        for engine in engines:
            event.listen(engine, "checkout", watch)
        try:
            yield work
        finally:
            for engine in engines:
                event.remove(engine, "checkout", watch)
            for raw in connections:
                raw.set_progress_handler(None, 0)
        return
    statements: list[tuple[str, Any]] = []

    def record(conn: Any, cursor: Any, statement: str, parameters: Any, context: Any, many: bool) -> None:
        if not many and statement.startswith(("SELECT", "WITH", "UPDATE", "SET LOCAL")):
            statements.append((statement, parameters))

    engines = (db.engine.sync_engine, db._sync)
    for engine in engines:
        event.listen(engine, "before_cursor_execute", record)
    try:
        yield work
    finally:
        for engine in engines:
            event.remove(engine, "before_cursor_execute", record)
    url = db.engine.url.set(drivername="postgresql").render_as_string(hide_password=False)
    with psycopg.connect(url) as server:
        # The tables of tests have few pages: whether reading all of them is the cheapest plan depends on a page more or
        # less. What is counted is the work of a large table's plan, which reads all only where no index helps.
        server.execute("SET enable_seqscan = off")
        for statement, parameters in statements:
            if statement.startswith("SET LOCAL"):
                server.execute(statement)
                continue
            if "pg_advisory" in statement:
                continue
            row = server.execute(f"EXPLAIN (ANALYZE, FORMAT JSON) {statement}", parameters).fetchone()
            assert row is not None
            [plan] = row[0] if isinstance(row[0], list) else json.loads(row[0])
            work.amount += _count_rows(plan["Plan"])
        server.rollback()  # an UPDATE is run a second time, for the rows that it reads


def _count_rows(node: dict[str, Any]) -> int:
    """Return the rows that a plan's node and those below it return or pass over, in all loops."""
    rows = sum(node.get(name, 0) for name in ("Actual Rows", "Rows Removed by Filter", "Rows Removed by Join Filter"))
    below = sum(_count_rows(child) for child in node.get("Plans", ()))
    return int((rows + 1) * node["Actual Loops"]) + below
