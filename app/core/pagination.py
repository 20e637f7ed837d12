"""Pages of a list, on the wire."""

from collections.abc import Sequence
from typing import Any, Generic, Literal, Self, TypeVar

from pydantic import BaseModel

T = TypeVar("T")


class Page(BaseModel, Generic[T]):
    """`last_id` is the `after` of the next page."""

    object: Literal["list"] = "list"
    data: list[T]
    first_id: str | None
    last_id: str | None
    has_more: bool

    @classmethod
    def cut(cls, views: Sequence[T], limit: int, *, id: str = "id") -> Self:
        """From up to one view more than was asked for. `id` is the field that tells views apart."""
        return cls(**ends(views[:limit], id), data=list(views[:limit]), has_more=len(views) > limit)


def ends(views: Sequence[Any], id: str = "id") -> dict[str, str | None]:
    first, last = (getattr(views[0], id), getattr(views[-1], id)) if views else (None, None)
    return {"first_id": first, "last_id": last}
