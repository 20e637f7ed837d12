"""Judgement: a request to a reward source that is answered off the hot path."""

from enum import StrEnum
from typing import Any

from sqlalchemy import Float, ForeignKey, Index, String, Text, UniqueConstraint, text
from sqlalchemy.orm import Mapped, mapped_column

from app.core.leases import LeaseMixin
from app.models.base import Base, Created, Json


class JudgementState(StrEnum):
    OPEN = "open"  # to be requested once it is due; claimed while its lease is in force
    DONE = "done"
    SKIPPED = "skipped"  # the source gave no value, or its budget was spent
    FAILED = "failed"  # every attempt failed


class Judgement(Created, LeaseMixin, Base):
    """A request to one reward source for its judgement of a turn, sent off the hot path. Its value becomes a reward."""

    __tablename__ = "judgements"

    id: Mapped[str] = mapped_column(String(48), primary_key=True)
    turn_id: Mapped[str] = mapped_column(ForeignKey("turns.id"))
    policy_id: Mapped[str] = mapped_column(ForeignKey("policies.id"))
    source: Mapped[str] = mapped_column(String(63), doc="its name in the policy's reward configuration")
    state: Mapped[str] = mapped_column(String(16), default=JudgementState.OPEN)
    due_at: Mapped[float] = mapped_column(Float, doc="the request is not sent before")
    value: Mapped[float | None] = mapped_column(Float, doc="in [-1, 1]")
    details: Mapped[dict[str, Any]] = mapped_column(Json, default=dict, doc="the source's response, tokens, seconds")
    reason: Mapped[str | None] = mapped_column(Text, doc="why it was skipped or failed")
    settled_at: Mapped[float | None] = mapped_column(Float)

    __table_args__ = (
        UniqueConstraint("turn_id", "source"),
        Index(
            "ix_judgements_due_at",
            "due_at",
            postgresql_where=text("state = 'open'"),
            sqlite_where=text("state = 'open'"),
        ),
        Index("ix_judgements_policy_id_source_settled_at", "policy_id", "source", "settled_at"),
    )
