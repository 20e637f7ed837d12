"""The order of rows in tests: a database promises none without ORDER BY, and PostgreSQL keeps none."""

from typing import Any

from sqlalchemy import ColumnElement, event
from sqlalchemy.engine import Engine
from sqlalchemy.engine.interfaces import DBAPIConnection
from sqlalchemy.orm import class_mapper


def creation_order(model: type[Any]) -> list[ColumnElement[Any]]:
    """Return the columns that put a table's rows into the order of creation: `seq`, else `created_at`; then the key."""
    mapper = class_mapper(model)
    first = [mapper.columns[name] for name in ("seq", "created_at") if name in mapper.columns][:1]
    return [*first, *mapper.primary_key]


def reverse_unordered_selects() -> None:
    """Let every SQLite connection of this process return rows without ORDER BY in reverse.

    By default SQLite returns them in the order of creation, so that a test that forgot an ORDER BY passes on SQLite
    always and on PostgreSQL nearly always.
    """

    @event.listens_for(Engine, "connect")
    def prepare(connection: DBAPIConnection, record: object) -> None:
        if "sqlite" in type(connection).__module__:
            cursor = connection.cursor()
            cursor.execute("PRAGMA reverse_unordered_selects = ON")
            cursor.close()
