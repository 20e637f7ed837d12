"""Response bodies of the datasets API."""

from collections.abc import Sequence
from typing import Any, Literal, Self

from pydantic import BaseModel

from app.core.pagination import Page
from app.models import Dataset, DatasetKind, DatasetRow


class DatasetView(BaseModel):
    object: Literal["dataset"] = "dataset"
    id: str
    name: str
    kind: DatasetKind
    num_rows: int
    sha256: str
    created_at: float

    @classmethod
    def of(cls, row: Dataset) -> Self:
        return cls.model_validate(row, from_attributes=True)


class DatasetList(Page[DatasetView]):
    @classmethod
    def of(cls, rows: Sequence[Dataset], limit: int) -> Self:
        return cls.from_rows([DatasetView.of(row) for row in rows], limit)


class RowView(BaseModel):
    """Prompts have `messages` and may have a `reference`; preferences have `messages`, `chosen` and `rejected`."""

    object: Literal["dataset.row"] = "dataset.row"
    number: int
    messages: list[dict[str, Any]]
    chosen: list[dict[str, Any]] | None = None
    rejected: list[dict[str, Any]] | None = None
    reference: str | None = None
    details: dict[str, Any] = {}

    @classmethod
    def of(cls, row: DatasetRow) -> Self:
        return cls(number=row.row_number, **row.content)


class RowList(BaseModel):
    """`last_number` is the `after` of the next page."""

    object: Literal["list"] = "list"
    data: list[RowView]
    last_number: int | None
    has_more: bool

    @classmethod
    def of(cls, rows: Sequence[DatasetRow], limit: int) -> Self:
        data = [RowView.of(row) for row in rows[:limit]]
        return cls(data=data, last_number=data[-1].number if data else None, has_more=len(rows) > limit)


class DatasetDeleted(BaseModel):
    object: Literal["dataset.deleted"] = "dataset.deleted"
    id: str
    deleted: bool = True
