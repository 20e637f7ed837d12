"""Audit: who moved what, when and why."""

from typing import Any

from sqlalchemy import Index, Integer, String, Text
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Mapped, mapped_column

from app.models.base import Base, Created, Json


class Audit(Created, Base):
    __tablename__ = "audit"

    seq: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=True)
    project_id: Mapped[str | None] = mapped_column(String(48), index=True, doc="whose it is; null when it is nobody's")
    actor: Mapped[str] = mapped_column(String(128), doc="a key's prefix, or the station that acted")
    action: Mapped[str] = mapped_column(String(64))
    subject: Mapped[str] = mapped_column(String(128))
    reason: Mapped[str | None] = mapped_column(Text)
    details: Mapped[dict[str, Any]] = mapped_column(Json, default=dict)

    __table_args__ = (Index("ix_audit_project_id_action_subject", "project_id", "action", "subject"),)


def record_audit(
    session: AsyncSession,
    actor: str,
    action: str,
    subject: str,
    reason: str | None = None,
    *,
    project_id: str,
    **details: Any,
) -> None:
    session.add(
        Audit(actor=actor, action=action, subject=subject, reason=reason, project_id=project_id, details=details)
    )
