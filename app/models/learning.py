"""Reward, Sample, Batch: what feedback is worth, a turn ready to be learned from, and the set one update takes."""

from enum import StrEnum
from typing import Any

from sqlalchemy import Float, ForeignKey, Index, Integer, String, Text, UniqueConstraint
from sqlalchemy.orm import Mapped, mapped_column

from app.models.base import Base, Created, Json
from app.models.lease import Leased


class Reward(Created, Base):
    """A number per turn and source, kept apart by source."""

    __tablename__ = "rewards"

    id: Mapped[str] = mapped_column(String(48), primary_key=True)
    turn_id: Mapped[str] = mapped_column(ForeignKey("turns.id"))
    source: Mapped[str] = mapped_column(Text, doc="name/kind/id of who said it")
    value: Mapped[float] = mapped_column(Float)

    __table_args__ = (UniqueConstraint("turn_id", "source"),)


class SampleState(StrEnum):
    OPEN = "open"
    BATCHED = "batched"
    TRAINED = "trained"
    DROPPED = "dropped"


class Sample(Created, Base):
    """At most one per turn, and in at most one batch: that is why nothing is used twice."""

    __tablename__ = "samples"

    turn_id: Mapped[str] = mapped_column(ForeignKey("turns.id"), primary_key=True)
    policy_id: Mapped[str] = mapped_column(ForeignKey("policies.id"))
    version_id: Mapped[str] = mapped_column(ForeignKey("versions.id"))
    reward: Mapped[float] = mapped_column(Float)
    state: Mapped[str] = mapped_column(String(16), default=SampleState.OPEN)
    reason: Mapped[str | None] = mapped_column(Text, doc="why it was dropped")
    batch_id: Mapped[str | None] = mapped_column(ForeignKey("batches.id"), index=True)

    __table_args__ = (Index("ix_samples_policy_id_state", "policy_id", "state"),)


class BatchState(StrEnum):
    OPEN = "open"  # frozen, waiting for the trainer; claimed while its lease runs
    TRAINED = "trained"
    REFUSED = "refused"  # nothing to learn: no variance
    FAILED = "failed"  # the head moved, or the update was not finite
    QUARANTINED = "quarantined"  # took the trainer down too often


class Batch(Created, Leased, Base):
    __tablename__ = "batches"

    id: Mapped[str] = mapped_column(String(48), primary_key=True)
    policy_id: Mapped[str] = mapped_column(ForeignKey("policies.id"), index=True)
    parent_id: Mapped[str] = mapped_column(ForeignKey("versions.id"), doc="the version this update starts from")
    state: Mapped[str] = mapped_column(String(16), index=True, default=BatchState.OPEN)
    reason: Mapped[str | None] = mapped_column(Text)
    num_samples: Mapped[int] = mapped_column(Integer)
    version_id: Mapped[str | None] = mapped_column(String(48), doc="the version it became")
    metrics: Mapped[dict[str, Any]] = mapped_column(Json, default=dict)
    settled_at: Mapped[float | None] = mapped_column(Float)
