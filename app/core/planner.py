"""Hints to the planners of the databases: for the rest of a transaction, or for one table of a statement."""

from typing import TypeVarTuple

from sqlalchemy import Select, text
from sqlalchemy.ext.asyncio import AsyncSession

Columns = TypeVarTuple("Columns")


def read_by(statement: Select[*Columns], table: type[object], index: str) -> Select[*Columns]:
    """Let SQLite read a table of the statement by this index, and no other. PostgreSQL chooses by its statistics.

    SQLite has none, since nobody runs ANALYZE: it takes the first index that has a column of the condition, or one in
    which it expects fewer rows because of an inequality. It refuses a statement whose conditions do not admit the
    index; `false()` is such a one, because SQLAlchemy leaves out the others beside it.
    """
    return statement.with_hint(table, f"INDEXED BY {index}", "sqlite")


async def prefer_indexes(session: AsyncSession) -> None:
    """Let PostgreSQL join row by row through indexes, for pages that read a bounded number of rows of large tables.

    It would read a whole table where it expects too many rows.
    """
    if session.get_bind().dialect.name == "postgresql":
        for name in ("enable_hashjoin", "enable_mergejoin"):
            await session.execute(text(f"SET LOCAL {name} = off"))
