"""Pages of large tables with filters for which there is no index.

A page looks at MAX_SCANNED rows at most, in the order of an index, and holds those of them that match. So a filter that
few rows match costs no more than any other; such a page may hold few rows, or none, although there are more.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from sqlalchemy import ColumnElement, select, tuple_
from sqlalchemy.ext.asyncio import AsyncSession

from app.core.rows import AnyRow, AnySelect

MAX_SCANNED = 5000


class ScannedPage(NamedTuple):
    """`last` is the key after which the next page begins; None on the last page."""

    rows: list[AnyRow]
    last: tuple[Any, ...] | None


async def read_page(
    session: AsyncSession,
    query: AnySelect,
    key: Sequence[Any],
    *,
    indexed: Sequence[ColumnElement[bool]],
    filters: Sequence[ColumnElement[bool]],
    after: tuple[Any, ...] | None,
    limit: int,
) -> ScannedPage:
    """Return up to `limit` rows of the query, the greatest key first.

    Args:
        query: Selects the columns. Its last columns are those of the key.
        key: Columns that identify a row and that an index orders, after those of `indexed`.
        indexed: Conditions that the index finds rows by.
        filters: Further conditions.
        after: The key of the row before the page.
    """
    order = [column.desc() for column in key]
    before = () if after is None else (tuple_(*key) < tuple_(*after),)
    end: Any = None
    if filters:
        last_scanned = select(*key).where(*indexed, *before).order_by(*order).offset(MAX_SCANNED - 1).limit(1)
        end = (await session.execute(last_scanned)).one_or_none()
        if end is not None:
            filters = [*filters, tuple_(*key) >= tuple_(*end)]
    page = query.where(*indexed, *before, *filters).order_by(*order).limit(limit + 1)
    rows = (await session.execute(page)).all()
    if len(rows) > limit:
        return ScannedPage(list(rows[:limit]), tuple(rows[limit - 1][-len(key) :]))
    return ScannedPage(list(rows), None if end is None else tuple(end))
