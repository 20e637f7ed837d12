"""Rater: a source of feedback, and how far it is trusted."""

from enum import StrEnum

from sqlalchemy import Float, ForeignKey, Index, Integer, String, Text
from sqlalchemy.orm import Mapped, mapped_column

from app.models.base import Base, Created


class RaterStanding(StrEnum):
    NORMAL = "normal"
    TRUSTED = "trusted"  # known to the operator: no caps apply, and its trust is not reduced
    QUARANTINED = "quarantined"  # too much or too unusual feedback: its samples wait for an admin
    BLOCKED = "blocked"  # set by an admin: its feedback is stored and never trained on


class Rater(Created, Base):
    """A person, a program or a judge, as the feedback names it. Its counts are updated when its feedback is curated."""

    __tablename__ = "raters"

    project_id: Mapped[str] = mapped_column(ForeignKey("projects.id"), primary_key=True)
    name: Mapped[str] = mapped_column(String(320), primary_key=True, doc='example: "HUMAN/user-7"')
    standing: Mapped[str] = mapped_column(String(16), default=RaterStanding.NORMAL)
    reason: Mapped[str | None] = mapped_column(Text, doc="why it has this standing")
    num_up: Mapped[int] = mapped_column(Integer, default=0, doc="rewards above 0, of all time")
    num_down: Mapped[int] = mapped_column(Integer, default=0, doc="rewards below 0")
    agreement_weight: Mapped[float] = mapped_column(
        Float, default=0.0, doc="total weight of its rewards with which others agreed"
    )
    disagreement_weight: Mapped[float] = mapped_column(Float, default=0.0)
    counted_day: Mapped[int] = mapped_column(Integer, default=0, doc="days since the epoch, database clock")
    num_today: Mapped[int] = mapped_column(Integer, default=0, doc="rewards on that day")

    __table_args__ = (Index("ix_raters_project_id_standing", "project_id", "standing"),)
