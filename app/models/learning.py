"""Judgement, Reward, Sample, Batch: what a turn is worth, a turn ready to be learned from, the set one update takes."""

from enum import StrEnum
from typing import Any

from sqlalchemy import Float, ForeignKey, Index, Integer, String, Text, UniqueConstraint, text
from sqlalchemy.orm import Mapped, mapped_column

from app.core.database import now
from app.core.leases import LeaseMixin
from app.models.base import Base, Created, Json


class Reward(Created, Base):
    """A number per turn and source, kept apart by source."""

    __tablename__ = "rewards"

    id: Mapped[str] = mapped_column(String(48), primary_key=True)
    turn_id: Mapped[str] = mapped_column(ForeignKey("turns.id"))
    source: Mapped[str] = mapped_column(
        Text, doc="of feedback: name/kind/id of who said it; else the source's name in the policy's rewards"
    )
    reward_source: Mapped[str] = mapped_column(
        String(63), server_default="explicit", doc="the source of the policy's rewards that it counts under"
    )
    rater: Mapped[str | None] = mapped_column(String(320), doc="who is answerable for it; null for a machine's")
    value: Mapped[float] = mapped_column(Float)
    weight: Mapped[float] = mapped_column(
        Float, default=1.0, server_default="1", doc="how far its rater is believed, 0 to 1"
    )

    __table_args__ = (UniqueConstraint("turn_id", "source"),)


class JudgementState(StrEnum):
    OPEN = "open"  # to be asked once it is due; claimed while its lease runs
    DONE = "done"
    SKIPPED = "skipped"  # the source had nothing to say, or its budget was spent
    FAILED = "failed"  # every attempt failed


class Judgement(Created, LeaseMixin, Base):
    """A question to one source about one turn, asked off the hot path. Its answer becomes a reward."""

    __tablename__ = "judgements"

    id: Mapped[str] = mapped_column(String(48), primary_key=True)
    turn_id: Mapped[str] = mapped_column(ForeignKey("turns.id"))
    policy_id: Mapped[str] = mapped_column(ForeignKey("policies.id"))
    source: Mapped[str] = mapped_column(String(63), doc="its name in the policy's rewards")
    state: Mapped[str] = mapped_column(String(16), default=JudgementState.OPEN)
    due_at: Mapped[float] = mapped_column(Float, doc="not to be asked before")
    value: Mapped[float | None] = mapped_column(Float, doc="in [-1, 1]")
    details: Mapped[dict[str, Any]] = mapped_column(Json, default=dict, doc="what was answered, tokens, seconds")
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


WITHDRAWN = "withdrawn"  # why a sample was dropped: nothing that counts is said of its turn any more


class SampleState(StrEnum):
    OPEN = "open"
    QUARANTINED = "quarantined"  # suspicious: an admin releases or drops it
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
    ready_at: Mapped[float] = mapped_column(
        Float, default=now(), server_default="0", doc="until then late signals are waited for"
    )
    conversation_id: Mapped[str | None] = mapped_column(String(255))
    rater: Mapped[str | None] = mapped_column(String(320), doc="whose word weighs most in it; null if no person's")
    cluster: Mapped[str | None] = mapped_column(String(32), doc="the same for near-duplicates")
    group_id: Mapped[str | None] = mapped_column(String(300), doc="replies to one prompt; the completion's if null")

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


class BatchState(StrEnum):
    OPEN = "open"  # frozen, waiting for the trainer; claimed while its lease runs
    TRAINED = "trained"
    REFUSED = "refused"  # nothing to learn: no variance
    FAILED = "failed"  # the head moved, or the update was not finite
    QUARANTINED = "quarantined"  # took the trainer down too often


class Batch(Created, LeaseMixin, Base):
    __tablename__ = "batches"

    id: Mapped[str] = mapped_column(String(48), primary_key=True)
    policy_id: Mapped[str] = mapped_column(ForeignKey("policies.id"), index=True)
    parent_id: Mapped[str] = mapped_column(ForeignKey("versions.id"), doc="the version this update starts from")
    state: Mapped[str] = mapped_column(String(16), index=True, default=BatchState.OPEN)
    reason: Mapped[str | None] = mapped_column(Text)
    num_samples: Mapped[int] = mapped_column(Integer)
    num_raters: Mapped[int | None] = mapped_column(Integer, doc="people behind it; null when it was not counted")
    claimed_at: Mapped[float | None] = mapped_column(Float, doc="when a trainer last took it")
    version_id: Mapped[str | None] = mapped_column(String(48), doc="the version it became")
    metrics: Mapped[dict[str, Any]] = mapped_column(Json, default=dict)
    settled_at: Mapped[float | None] = mapped_column(Float)
