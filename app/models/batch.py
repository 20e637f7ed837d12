"""Sample and Batch: turns with their rewards, and the frozen sets of them that updates are trained on."""

from enum import StrEnum
from typing import Any

from sqlalchemy import ForeignKey, Index, String
from sqlalchemy.orm import Mapped, mapped_column

from app.core.database import now
from app.core.leases import LeaseMixin
from app.models.base import Base, Created, Entity, partial_index

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
    reward: Mapped[float]
    state: Mapped[str] = mapped_column(String(16), default=SampleState.OPEN)
    reason: Mapped[str | None] = mapped_column(doc="why it was dropped")
    batch_id: Mapped[str | None] = mapped_column(ForeignKey("batches.id"), index=True)
    ready_at: Mapped[float] = mapped_column(
        default=now(), server_default="0", doc="it waits for late rewards until then"
    )
    conversation_id: Mapped[str | None] = mapped_column(String(255))
    rater: Mapped[str | None] = mapped_column(String(320), doc="the rater with the most weight; null if no person")
    cluster: Mapped[str | None] = mapped_column(String(32), doc="equal for near-duplicates")
    group_id: Mapped[str | None] = mapped_column(
        String(300), doc="equal for replies to one prompt; the completion's group if null"
    )

    __table_args__ = (
        Index("ix_samples_policy_id_state", "policy_id", "state"),
        partial_index("ix_samples_policy_id_ready_at", "policy_id", "ready_at", where="state = 'open'"),
    )


class BatchState(StrEnum):
    OPEN = "open"  # waits for the trainer; claimed while its lease is in force
    TRAINED = "trained"
    REFUSED = "refused"  # its rewards have no variance
    FAILED = "failed"  # the head moved, or the update was not finite
    QUARANTINED = "quarantined"  # crashed the trainer too often


class Batch(Entity, LeaseMixin, Base):
    """A frozen set of samples for one update."""

    __tablename__ = "batches"

    policy_id: Mapped[str] = mapped_column(ForeignKey("policies.id"), index=True)
    parent_id: Mapped[str] = mapped_column(ForeignKey("versions.id"), doc="the version this update starts from")
    state: Mapped[str] = mapped_column(String(16), index=True, default=BatchState.OPEN)
    reason: Mapped[str | None]
    num_samples: Mapped[int]
    num_raters: Mapped[int | None] = mapped_column(doc="distinct raters of its samples; null when not counted")
    claimed_at: Mapped[float | None] = mapped_column(doc="when a trainer last claimed it")
    version_id: Mapped[str | None] = mapped_column(String(48), doc="the version that the update created")
    metrics: Mapped[dict[str, Any]] = mapped_column(default=dict)
    settled_at: Mapped[float | None]
