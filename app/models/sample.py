"""Sample: a turn with its reward, ready for training."""

from enum import StrEnum

from sqlalchemy import Float, ForeignKey, Index, String, Text, text
from sqlalchemy.orm import Mapped, mapped_column

from app.core.database import now
from app.models.base import Base, Created

WITHDRAWN = "withdrawn"  # why a sample was dropped: its turn has no effective feedback left


class SampleState(StrEnum):
    OPEN = "open"
    QUARANTINED = "quarantined"  # suspicious: waits until an admin releases or drops it
    BATCHED = "batched"
    TRAINED = "trained"
    DROPPED = "dropped"


class Sample(Created, Base):
    """A turn with its reward. There is at most one per turn, in at most one batch, so nothing is trained on twice."""

    __tablename__ = "samples"

    turn_id: Mapped[str] = mapped_column(ForeignKey("turns.id"), primary_key=True)
    policy_id: Mapped[str] = mapped_column(ForeignKey("policies.id"))
    version_id: Mapped[str] = mapped_column(ForeignKey("versions.id"))
    reward: Mapped[float] = mapped_column(Float)
    state: Mapped[str] = mapped_column(String(16), default=SampleState.OPEN)
    reason: Mapped[str | None] = mapped_column(Text, doc="why it was dropped")
    batch_id: Mapped[str | None] = mapped_column(ForeignKey("batches.id"), index=True)
    ready_at: Mapped[float] = mapped_column(
        Float, default=now(), server_default="0", doc="until then it waits for late rewards"
    )
    conversation_id: Mapped[str | None] = mapped_column(String(255))
    rater: Mapped[str | None] = mapped_column(
        String(320), doc="the rater with the largest weight in the reward; null if no person"
    )
    cluster: Mapped[str | None] = mapped_column(String(32), doc="equal for near-duplicates")
    group_id: Mapped[str | None] = mapped_column(
        String(300), doc="equal for replies to one prompt; the completion's group if null"
    )

    __table_args__ = (
        Index("ix_samples_policy_id_state", "policy_id", "state"),
        Index(
            "ix_samples_policy_id_ready_at",
            "policy_id",
            "ready_at",
            postgresql_where=text("state = 'open'"),
            sqlite_where=text("state = 'open'"),
        ),
    )
