"""The audit log on the wire."""

from collections.abc import Sequence
from typing import Any, Literal, Self

from pydantic import BaseModel

from app.models import Audit


class AuditView(BaseModel):
    object: Literal["audit.entry"] = "audit.entry"
    number: int
    created_at: float
    actor: str
    action: str
    subject: str
    reason: str | None
    details: dict[str, Any]

    @classmethod
    def of(cls, row: Audit) -> Self:
        same = ("created_at", "actor", "action", "subject", "reason", "details")
        return cls(number=row.seq, **{name: getattr(row, name) for name in same})


class AuditPage(BaseModel):
    """`last_number` is the `after` of the next page."""

    object: Literal["list"] = "list"
    data: list[AuditView]
    last_number: int | None
    has_more: bool

    @classmethod
    def of(cls, rows: Sequence[Audit], limit: int) -> Self:
        data = [AuditView.of(row) for row in rows[:limit]]
        return cls(data=data, last_number=data[-1].number if data else None, has_more=len(rows) > limit)
