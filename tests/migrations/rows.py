"""A row in every table of whatever schema a database has, so that migrations run over data."""

import math
from typing import Any

import sqlalchemy as sa

Rows = dict[str, list[dict[str, Any]]]


def tables(connection: sa.Connection) -> list[sa.Table]:
    """As they are in the database; referred ones first."""
    metadata = sa.MetaData()
    metadata.reflect(connection)
    return [table for table in metadata.sorted_tables if table.name != "alembic_version"]


def fill(connection: sa.Connection, mark: str) -> None:
    """One more row in every table, every column set, foreign keys to the rows of the same `mark`."""
    made: dict[str, dict[str, Any]] = {}
    for table in tables(connection):
        made[table.name] = {}
        for column in table.columns:
            refers = next((key.column for key in column.foreign_keys), None)
            if refers is None:
                made[table.name][column.name] = value(column, mark)
            elif refers.table is not table:
                made[table.name][column.name] = made[refers.table.name][refers.name]
        connection.execute(sa.insert(table), made[table.name])


def value(column: sa.Column[Any], mark: str) -> Any:
    kind = column.type
    if isinstance(kind, sa.JSON):
        return {"mark": mark}
    if isinstance(kind, sa.String):
        return f"{mark}-{column.table.name}-{column.name}"[: kind.length or 300]
    if isinstance(kind, sa.Boolean):
        return True
    if isinstance(kind, sa.Integer):
        return sum(mark.encode())
    if isinstance(kind, sa.Float):
        return 0.5
    if isinstance(kind, sa.LargeBinary):
        return b"\x01\x00\x00\x00"
    raise AssertionError(f"{column}: say in tests/migrations/rows.py what a {kind!r} may hold")


def kept(connection: sa.Connection) -> Rows:
    """Everything there is."""
    return {
        table.name: [dict(row) for row in connection.execute(sa.select(table)).mappings()]
        for table in tables(connection)
    }


def lost(before: Rows, after: Rows) -> list[str]:
    """What was there before and is not now, in the tables and columns that both schemas have."""
    return [
        f"{name}: {row}"
        for name in before.keys() & after.keys()
        for row in before[name]
        if not any(same(row, other) for other in after[name])
    ]


def same(row: dict[str, Any], other: dict[str, Any]) -> bool:
    return all(equal(row[name], other[name]) for name in row.keys() & other.keys())


def equal(one: Any, other: Any) -> bool:
    return math.isclose(one, other) if isinstance(one, float) and isinstance(other, float) else bool(one == other)
