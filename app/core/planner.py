"""Hints to PostgreSQL's planner, for the rest of a transaction."""

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession


async def prefer_indexes(session: AsyncSession) -> None:
    """Let PostgreSQL join row by row through indexes, for pages that read a bounded number of rows of large tables.

    It would read a whole table where it expects too many rows.
    """
    if session.get_bind().dialect.name == "postgresql":
        for name in ("enable_hashjoin", "enable_mergejoin"):
            await session.execute(text(f"SET LOCAL {name} = off"))
