"""Reward: what one source says a turn is worth."""

from sqlalchemy import Float, ForeignKey, String, Text, UniqueConstraint
from sqlalchemy.orm import Mapped, mapped_column

from app.models.base import Base, Created


class Reward(Created, Base):
    """A number per turn and source. A turn's rewards are combined when its sample is built."""

    __tablename__ = "rewards"

    id: Mapped[str] = mapped_column(String(48), primary_key=True)
    turn_id: Mapped[str] = mapped_column(ForeignKey("turns.id"))
    source: Mapped[str] = mapped_column(
        Text,
        doc="of feedback: name/kind/id of its source; otherwise the reward source's name in the policy's configuration",
    )
    reward_source: Mapped[str] = mapped_column(
        String(63), server_default="explicit", doc="the reward source in the policy's configuration that it belongs to"
    )
    rater: Mapped[str | None] = mapped_column(String(320), doc="the rater behind it; null for a machine's")
    value: Mapped[float] = mapped_column(Float)
    weight: Mapped[float] = mapped_column(Float, default=1.0, server_default="1", doc="trust in its rater, 0 to 1")

    __table_args__ = (UniqueConstraint("turn_id", "source"),)
