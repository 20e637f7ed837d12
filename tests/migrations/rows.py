"""Insert a row into every table of a database, whatever its schema, so that migrations run over data."""

import math
import zlib
from typing import Any

import sqlalchemy as sa

from app.core.schema_version import COMPATIBILITY, VERSION

Rows = dict[str, list[dict[str, Any]]]


def reflect_tables(connection: sa.Connection) -> list[sa.Table]:
    """Return the tables of the database, referenced tables first."""
    metadata = sa.MetaData()
    metadata.reflect(connection)
    return [table for table in metadata.sorted_tables if table.name not in (VERSION.name, COMPATIBILITY.name)]


def insert_rows(connection: sa.Connection, mark: str, tables: list[sa.Table] | None = None) -> None:
    """Insert a row into every table, with every column set and foreign keys to the rows of the same `mark`.

    `tables` are those of the database, or of an earlier schema."""
    inserted: dict[str, dict[str, Any]] = {}
    for table in tables or reflect_tables(connection):
        inserted[table.name] = {}
        for column in table.columns:
            refers = next((key.column for key in column.foreign_keys), None)
            if refers is None:
                inserted[table.name][column.name] = make_value(column, mark)
            elif refers.table is not table:
                inserted[table.name][column.name] = inserted[refers.table.name][refers.name]
        connection.execute(sa.insert(table), inserted[table.name])


def make_value(column: sa.Column[Any], mark: str) -> Any:
    kind = column.type
    if isinstance(kind, sa.JSON):
        return {"mark": mark}
    if isinstance(kind, sa.String):
        return f"{mark}-{column.table.name}-{column.name}"[: kind.length or 300]
    if isinstance(kind, sa.Boolean):
        return True
    if isinstance(kind, sa.Integer):
        return zlib.crc32(mark.encode()) >> 1  # fits a signed integer of 32 bits, and differs for each mark
    if isinstance(kind, sa.Float):
        return 0.5
    if isinstance(kind, sa.LargeBinary):
        return b"\x01\x00\x00\x00"
    raise AssertionError(f"{column}: add a value for {kind!r} to tests/migrations/rows.py")


def read_rows(connection: sa.Connection, tables: list[sa.Table] | None = None) -> Rows:
    """Return every row of every table."""
    return {
        table.name: [dict(row) for row in connection.execute(sa.select(table)).mappings()]
        for table in tables or reflect_tables(connection)
    }


def find_lost_rows(before: Rows, after: Rows) -> list[str]:
    """Return the rows of `before` that `after` lacks, in the tables and columns that both schemas have."""
    return [f"{name}: {row}" for name in before.keys() & after.keys() for row in lost_rows(before[name], after[name])]


def lost_rows(before: list[dict[str, Any]], after: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows of `before` without a match in `after`."""
    if not (before and after):
        return before
    common = sorted(before[0].keys() & after[0].keys())
    # Nearly all rows are found as they were: only the others are compared with every row.
    unchanged = {repr([row[name] for name in common]) for row in after}
    changed = [row for row in before if repr([row[name] for name in common]) not in unchanged]
    return [row for row in changed if not any(rows_match(row, other) for other in after)]


def rows_match(row: dict[str, Any], other: dict[str, Any]) -> bool:
    return all(values_equal(row[name], other[name]) for name in row.keys() & other.keys())


def values_equal(one: Any, other: Any) -> bool:
    return math.isclose(one, other) if isinstance(one, float) and isinstance(other, float) else bool(one == other)
