"""Feedback: what somebody said about a turn. Append-only; the latest per turn, name and source counts."""

from typing import Any

from sqlalchemy import Boolean, Float, ForeignKey, Index, Integer, String, Text, UniqueConstraint
from sqlalchemy.orm import Mapped, mapped_column

from app.models.base import Base, Created, Json


class Feedback(Created, Base):
    __tablename__ = "feedback"

    seq: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=True, doc="order of arrival")
    id: Mapped[str] = mapped_column(String(48), unique=True)
    project_id: Mapped[str] = mapped_column(ForeignKey("projects.id"))
    turn_id: Mapped[str] = mapped_column(ForeignKey("turns.id"), index=True)
    kind: Mapped[str] = mapped_column(String(16))
    name: Mapped[str] = mapped_column(String(63))
    value: Mapped[float] = mapped_column(Float, doc="binary: 1 or -1; score: in [-1, 1]")
    comment: Mapped[str | None] = mapped_column(Text)
    source_kind: Mapped[str] = mapped_column(String(16))
    source_id: Mapped[str | None] = mapped_column(String(255))
    details: Mapped[dict[str, Any]] = mapped_column(Json, default=dict, doc="the caller's metadata")
    idempotency_key: Mapped[str] = mapped_column(String(255))
    fingerprint: Mapped[str] = mapped_column(String(64), doc="SHA-256 of the body that came under this key")
    curated: Mapped[bool] = mapped_column(Boolean, default=False)

    __table_args__ = (
        UniqueConstraint("project_id", "idempotency_key"),
        Index("ix_feedback_curated", "curated"),
    )
