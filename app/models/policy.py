"""Policy, Version, Deployment: what is learned, its immutable results, and the pointer to the one that serves."""

from enum import StrEnum
from typing import Any

from sqlalchemy import Float, ForeignKey, Integer, String, Text, UniqueConstraint
from sqlalchemy.orm import Mapped, mapped_column

from app.models.base import Base, Created, Json
from app.models.lease import Leased


class Policy(Created, Base):
    """A base model plus a line of versions. `head` is where learning goes on from; it may be ahead of what serves."""

    __tablename__ = "policies"

    id: Mapped[str] = mapped_column(String(48), primary_key=True)
    project_id: Mapped[str] = mapped_column(ForeignKey("projects.id"), index=True)
    name: Mapped[str] = mapped_column(String(63))
    base_model: Mapped[str] = mapped_column(Text)
    head_version_id: Mapped[str | None] = mapped_column(String(48))

    __table_args__ = (UniqueConstraint("project_id", "name"),)


class VersionState(StrEnum):
    TRAINED = "trained"
    PROVEN = "proven"
    LIVE = "live"
    SUPERSEDED = "superseded"
    ROLLED_BACK = "rolled_back"
    REJECTED = "rejected"


class Version(Created, Leased, Base):
    """An immutable result of an update. Version 0 is the base model: it has no adapter and no parent."""

    __tablename__ = "versions"

    id: Mapped[str] = mapped_column(String(48), primary_key=True)
    policy_id: Mapped[str] = mapped_column(ForeignKey("policies.id"), index=True)
    number: Mapped[int] = mapped_column(Integer)
    parent_id: Mapped[str | None] = mapped_column(ForeignKey("versions.id"))
    batch_id: Mapped[str | None] = mapped_column(String(48))
    state: Mapped[str] = mapped_column(String(16), index=True)
    reason: Mapped[str | None] = mapped_column(Text, doc="why it was rejected or rolled back")
    adapter_name: Mapped[str | None] = mapped_column(String(80), unique=True)
    adapter_path: Mapped[str | None] = mapped_column(Text)
    manifest_sha256: Mapped[str | None] = mapped_column(String(64))
    probe: Mapped[dict[str, Any] | None] = mapped_column(Json, doc="token ids and the trainer's log-probs of them")
    metrics: Mapped[dict[str, Any]] = mapped_column(Json, default=dict)
    timings: Mapped[dict[str, Any]] = mapped_column(Json, default=dict, doc="seconds by phase, trained to served")
    live_at: Mapped[float | None] = mapped_column(Float)

    __table_args__ = (UniqueConstraint("policy_id", "number"),)


class Deployment(Base):
    """The pointer. Publishing and rolling back are one UPDATE of this row; `epoch` counts its moves."""

    __tablename__ = "deployments"

    policy_id: Mapped[str] = mapped_column(ForeignKey("policies.id"), primary_key=True)
    version_id: Mapped[str] = mapped_column(ForeignKey("versions.id"))
    previous_version_id: Mapped[str | None] = mapped_column(ForeignKey("versions.id"))
    epoch: Mapped[int] = mapped_column(Integer, default=0)
    moved_at: Mapped[float | None] = mapped_column(Float)
