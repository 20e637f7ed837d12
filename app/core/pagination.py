"""Keyset pagination: a list is read in pages, and each page begins after the last row of the page before."""

from collections.abc import Sequence
from typing import Any, Generic, Literal, Self, TypeVar

from pydantic import BaseModel
from sqlalchemy import tuple_
from sqlalchemy.orm import DeclarativeBase

from app.core.rows import AnySelect

T = TypeVar("T")
Q = TypeVar("Q", bound=AnySelect)
Position = DeclarativeBase | Sequence[Any] | None


def apply_keyset(query: Q, columns: Sequence[Any], after: Position, limit: int, *, descending: bool = False) -> Q:
    """Return `query` ordered by `columns`, after the row `after`, which is an object or the values of the columns.

    The columns together must identify a row. The query returns up to `limit + 1` rows: the extra row shows that there
    is another page (see `Page.from_rows`).
    """
    if isinstance(after, DeclarativeBase):
        after = tuple(getattr(after, column.key) for column in columns)
    if after is not None:
        key = tuple_(*columns) if len(columns) > 1 else columns[0]
        last = tuple_(*after) if len(columns) > 1 else after[0]
        query = query.where(key < last if descending else key > last)
    return query.order_by(*(column.desc() if descending else column for column in columns)).limit(limit + 1)


class Page(BaseModel, Generic[T]):
    """`last_id` is the `after` of the next page."""

    object: Literal["list"] = "list"
    data: list[T]
    first_id: str | None
    last_id: str | None
    has_more: bool

    @classmethod
    def from_rows(cls, views: Sequence[T], limit: int, *, id: str = "id", **fields: Any) -> Self:
        """Build a page from up to `limit + 1` views. `id` is the field that identifies a view.

        `fields` are those that a subclass adds.
        """
        data = list(views[:limit])
        first, last = (getattr(data[0], id), getattr(data[-1], id)) if data else (None, None)
        return cls(data=data, first_id=first, last_id=last, has_more=len(views) > limit, **fields)
