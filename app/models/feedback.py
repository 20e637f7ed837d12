"""Feedback: append-only events. The latest per target, name and source is the effective one."""

from enum import StrEnum
from typing import Any

from sqlalchemy import Boolean, Float, ForeignKey, Index, Integer, String, Text, UniqueConstraint, text
from sqlalchemy.orm import Mapped, mapped_column

from app.models.base import Base, Created, Json

NUMERIC_KINDS = ("binary", "rating", "score")  # kinds of feedback whose value is a number in [-1, 1]
RANKING_KINDS = ("comparison", "ranking")  # kinds of feedback that put several turns in order


class SourceKind(StrEnum):
    """Who gave the feedback."""

    HUMAN = "HUMAN"
    LLM_JUDGE = "LLM_JUDGE"
    CODE = "CODE"


class Feedback(Created, Base):
    """What a source said about a turn, a conversation, or (comparisons and rankings) the turns of its FeedbackRanks."""

    __tablename__ = "feedback"

    seq: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=True, doc="order of arrival")
    id: Mapped[str] = mapped_column(String(48), unique=True)
    project_id: Mapped[str] = mapped_column(ForeignKey("projects.id"))
    turn_id: Mapped[str | None] = mapped_column(ForeignKey("turns.id"), index=True)
    conversation_id: Mapped[str | None] = mapped_column(String(255))
    target: Mapped[str] = mapped_column(
        String(300),
        nullable=True,
        doc="what the feedback is about, as one string: the latest per target, name and source is effective",
    )
    kind: Mapped[str] = mapped_column(String(16))
    name: Mapped[str] = mapped_column(String(63))
    value: Mapped[float | None] = mapped_column(Float, doc="binary: 1 or -1; score and rating: in [-1, 1]")
    raw_value: Mapped[Any | None] = mapped_column(Json, doc="the value as it was sent; null for a withdrawal")
    comment: Mapped[str | None] = mapped_column(Text)
    source_kind: Mapped[str] = mapped_column(String(16))
    source_id: Mapped[str | None] = mapped_column(String(255))
    request_metadata: Mapped[dict[str, Any]] = mapped_column(Json, default=dict, doc="the caller's metadata")
    idempotency_key: Mapped[str] = mapped_column(String(255))
    fingerprint: Mapped[str] = mapped_column(String(64), doc="SHA-256 of the request body with this key")
    processed: Mapped[bool] = mapped_column(Boolean, default=False)

    __table_args__ = (
        UniqueConstraint("project_id", "idempotency_key"),
        Index(
            "ix_feedback_processed", "seq", postgresql_where=text("NOT processed"), sqlite_where=text("processed = 0")
        ),
        Index("ix_feedback_project_id_target", "project_id", "target"),
        Index("ix_feedback_project_id_conversation_id", "project_id", "conversation_id"),
        Index(
            "ix_feedback_project_id_source_id",
            "project_id",
            "source_id",
            postgresql_where=text("source_id IS NOT NULL"),
            sqlite_where=text("source_id IS NOT NULL"),
        ),
    )


class FeedbackRank(Base):
    """One turn of a comparison or a ranking: rank 0 is the best, equal ranks are ties."""

    __tablename__ = "feedback_ranks"

    feedback_seq: Mapped[int] = mapped_column(ForeignKey("feedback.seq"), primary_key=True)
    turn_id: Mapped[str] = mapped_column(ForeignKey("turns.id"), primary_key=True, index=True)
    rank: Mapped[int] = mapped_column(Integer)
