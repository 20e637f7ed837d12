"""Steps of migrations that take long and must not stop the service: indexes and backfills.

On PostgreSQL these steps commit what came before them. So a migration that uses one does nothing else that must not be
done twice; one that was killed continues when it is run again. On SQLite they are part of the upgrade's transaction.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import sqlalchemy as sa
from alembic import op
from sqlalchemy.engine import Connection

log = logging.getLogger("attune.migrate")
BATCH_ROWS = 1000
REPORT_ROWS = 100_000
IS_INVALID = "SELECT NOT indisvalid FROM pg_index WHERE indexrelid = to_regclass(:name)"


def create_index(name: str, table: str, columns: list[str], **options: Any) -> None:
    """Create an index while the table is read and written. `options` are those of Alembic's `create_index`."""
    if op.get_bind().dialect.name != "postgresql":
        op.create_index(name, table, columns, **options)
        return
    with _autocommit_without_lock_timeout() as connection:
        log.info("building the index %s; this waits for all transactions that are older", name)
        if connection.scalar(sa.text(IS_INVALID), {"name": name}):  # a build that was killed leaves it behind
            op.drop_index(name, table, postgresql_concurrently=True)
        op.create_index(name, table, columns, postgresql_concurrently=True, if_not_exists=True, **options)


def drop_index(name: str, table: str) -> None:
    """Drop an index while the table is read and written."""
    if op.get_bind().dialect.name != "postgresql":
        op.drop_index(name, table)
        return
    with _autocommit_without_lock_timeout():
        op.drop_index(name, table, postgresql_concurrently=True, if_exists=True)


@contextmanager
def _autocommit_without_lock_timeout() -> Iterator[Connection]:
    """CONCURRENTLY waits for all older transactions, and nobody but other migrations waits for it."""
    with op.get_context().autocommit_block():
        connection = op.get_bind()
        before = connection.scalar(sa.text("SHOW lock_timeout"))
        connection.exec_driver_sql("SET lock_timeout = 0")
        yield connection
        connection.exec_driver_sql(f"SET lock_timeout = '{before}'")


def backfill(table: str, values: str, where: str, *, key: str = "id", batch_rows: int = BATCH_ROWS) -> int:
    """Fill columns of the rows that a condition names, in the order of the primary key. Return the number of rows.

    On PostgreSQL each batch is a transaction. A filled row must not meet `where` any more: that is how a backfill that
    was killed continues where it was. Rows that old code inserts meanwhile may be missed, so the migration that relies
    on the values runs the backfill once more.

    Args:
        table, key: The table and its primary key, one column.
        values: SQL of the assignments, e.g. "size = length(body)".
        where: SQL of the rows that are not filled, e.g. "size IS NULL".
    """
    if op.get_bind().dialect.name != "postgresql":
        return _run_batches(op.get_bind(), table, values, where, key, batch_rows)
    with op.get_context().autocommit_block():
        return _run_batches(op.get_bind(), table, values, where, key, batch_rows)


def _run_batches(connection: Connection, table: str, values: str, where: str, key: str, batch_rows: int) -> int:
    last, num_rows = None, 0
    while True:
        after = "" if last is None else f"AND {key} > :last"
        batch = f"SELECT {key} FROM {table} WHERE ({where}) {after} ORDER BY {key} LIMIT {batch_rows}"
        end = connection.scalar(sa.text(f"SELECT max({key}) FROM ({batch}) AS batch"), {"last": last} if after else {})
        if end is None:
            log.info("backfill of %s: %d rows, finished", table, num_rows)
            return num_rows
        update = f"UPDATE {table} SET {values} WHERE ({where}) AND {key} <= :end {after}"
        num_updated = connection.execute(sa.text(update), {"end": end} | ({"last": last} if after else {})).rowcount
        if (num_rows + num_updated) // REPORT_ROWS > num_rows // REPORT_ROWS:
            log.info("backfill of %s: %d rows, up to %s %s", table, num_rows + num_updated, key, end)
        num_rows, last = num_rows + num_updated, end
