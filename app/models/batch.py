"""Batch: the samples of one update."""

from enum import StrEnum
from typing import Any

from sqlalchemy import Float, ForeignKey, Integer, String, Text
from sqlalchemy.orm import Mapped, mapped_column

from app.core.leases import LeaseMixin
from app.models.base import Base, Created, Json


class BatchState(StrEnum):
    OPEN = "open"  # waits for the trainer; claimed while its lease is in force
    TRAINED = "trained"
    REFUSED = "refused"  # its rewards have no variance
    FAILED = "failed"  # the head moved, or the update was not finite
    QUARANTINED = "quarantined"  # crashed the trainer too often


class Batch(Created, LeaseMixin, Base):
    """A frozen set of samples for one update."""

    __tablename__ = "batches"

    id: Mapped[str] = mapped_column(String(48), primary_key=True)
    policy_id: Mapped[str] = mapped_column(ForeignKey("policies.id"), index=True)
    parent_id: Mapped[str] = mapped_column(ForeignKey("versions.id"), doc="the version this update starts from")
    state: Mapped[str] = mapped_column(String(16), index=True, default=BatchState.OPEN)
    reason: Mapped[str | None] = mapped_column(Text)
    num_samples: Mapped[int] = mapped_column(Integer)
    num_raters: Mapped[int | None] = mapped_column(Integer, doc="distinct raters of its samples; null when not counted")
    claimed_at: Mapped[float | None] = mapped_column(Float, doc="when a trainer last claimed it")
    version_id: Mapped[str | None] = mapped_column(String(48), doc="the version that the update created")
    metrics: Mapped[dict[str, Any]] = mapped_column(Json, default=dict)
    settled_at: Mapped[float | None] = mapped_column(Float)
