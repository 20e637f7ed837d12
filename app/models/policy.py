"""Policy, Version, Deployment: what is learned, its immutable results, and the pointer to the one that serves."""

from enum import StrEnum
from typing import Any

from sqlalchemy import Boolean, Float, ForeignKey, Integer, String, Text, UniqueConstraint, false
from sqlalchemy.orm import Mapped, mapped_column

from app.core.leases import LeaseMixin
from app.models.base import Base, Created, Json


class LearningMode(StrEnum):
    """How a policy learns; app/training/kl_guard.py holds the transitions."""

    ASYNCHRONOUS = "asynchronous"  # samples of the last few versions
    SYNCHRONOUS = "synchronous"  # after an alarm: one round on samples of the serving version alone
    HALTED = "halted"  # alarm after alarm, or an operator's word: nothing is assembled


class ConversationRouting(StrEnum):
    """What a conversation does when the pointer moves under it."""

    FOLLOW = "follow"  # its next turn is the new version's
    STICKY = "sticky"  # it ends on the version it began with, unless that is rolled back or no longer loaded


class Policy(Created, Base):
    """A base model plus a line of versions. `head` is where learning goes on from; it may be ahead of what serves."""

    __tablename__ = "policies"

    id: Mapped[str] = mapped_column(String(48), primary_key=True)
    project_id: Mapped[str] = mapped_column(ForeignKey("projects.id"), index=True)
    name: Mapped[str] = mapped_column(String(63))
    base_model: Mapped[str] = mapped_column(Text)
    head_version_id: Mapped[str | None] = mapped_column(String(48))
    rewards: Mapped[dict[str, Any] | None] = mapped_column(
        Json, doc="its own alignment.config.rewards.RewardsConfig; the deployment's when null"
    )
    rollouts: Mapped[dict[str, Any] | None] = mapped_column(
        Json, doc="its own alignment.config.rollouts.RolloutsConfig; the deployment's when null"
    )
    mode: Mapped[str] = mapped_column(
        String(16), default=LearningMode.ASYNCHRONOUS, server_default=LearningMode.ASYNCHRONOUS
    )
    mode_reason: Mapped[str | None] = mapped_column(Text)
    mode_since: Mapped[float | None] = mapped_column(Float)
    kl_alarms: Mapped[int] = mapped_column(Integer, default=0, server_default="0", doc="of the guard, in a row")
    conversations: Mapped[str] = mapped_column(
        String(16), default=ConversationRouting.FOLLOW, server_default=ConversationRouting.FOLLOW
    )
    canary: Mapped[dict[str, Any] | None] = mapped_column(
        Json, doc="its own alignment.release.canary.CanaryConfig; the deployment's when null"
    )
    shadow: Mapped[dict[str, Any] | None] = mapped_column(
        Json, doc="its own alignment.release.shadow.RehearsalConfig; the deployment's when null"
    )

    __table_args__ = (UniqueConstraint("project_id", "name"),)


class VersionState(StrEnum):
    TRAINED = "trained"
    VERIFIED = "verified"
    SHADOW = "shadow"  # it answers beside what serves, and nobody hears it
    SHADOW_PASSED = "shadow_passed"  # and may go out
    CANARY = "canary"  # some are answered by it, and it is watched
    LIVE = "live"
    SUPERSEDED = "superseded"
    ROLLED_BACK = "rolled_back"
    REJECTED = "rejected"


PENDING_RELEASE = (
    VersionState.TRAINED,
    VersionState.VERIFIED,
    VersionState.SHADOW,
    VersionState.SHADOW_PASSED,
)  # on their way home
ONCE_LIVE = (VersionState.LIVE, VersionState.SUPERSEDED, VersionState.ROLLED_BACK)  # what the pointer has pointed to
SERVED_TRAFFIC = (*ONCE_LIVE, VersionState.CANARY)  # people have heard it, or hear it


class Version(Created, LeaseMixin, Base):
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
    full_weights: Mapped[bool] = mapped_column(
        Boolean, default=False, server_default=false(), doc="all weights, and no adapter over the base model's"
    )
    manifest_sha256: Mapped[str | None] = mapped_column(String(64))
    probe: Mapped[dict[str, Any] | None] = mapped_column(Json, doc="token ids and the trainer's log-probs of them")
    metrics: Mapped[dict[str, Any]] = mapped_column(Json, default=dict)
    timings: Mapped[dict[str, Any]] = mapped_column(Json, default=dict, doc="seconds by phase, trained to served")
    shadow_since: Mapped[float | None] = mapped_column(Float)
    live_at: Mapped[float | None] = mapped_column(Float)
    tainted_at: Mapped[float | None] = mapped_column(
        Float, doc="since when it, or a version it stands on, has learned from what has been erased"
    )

    __table_args__ = (UniqueConstraint("policy_id", "number"),)

    @property
    def adapter(self) -> str | None:
        """What an engine is asked by. None for the base model, and for full weights: those are the engine's own."""
        return None if self.full_weights else self.adapter_name

    @property
    def weights(self) -> str | None:
        """What an engine's own weights must be. None is the base model's."""
        return self.adapter_name if self.full_weights else None


class Deployment(Base):
    """The pointer. Publishing and rolling back are one UPDATE of this row; `epoch` counts its moves."""

    __tablename__ = "deployments"

    policy_id: Mapped[str] = mapped_column(ForeignKey("policies.id"), primary_key=True)
    version_id: Mapped[str] = mapped_column(ForeignKey("versions.id"))
    previous_version_id: Mapped[str | None] = mapped_column(ForeignKey("versions.id"))
    epoch: Mapped[int] = mapped_column(Integer, default=0)
    changed_at: Mapped[float | None] = mapped_column(Float)
    canary_version_id: Mapped[str | None] = mapped_column(ForeignKey("versions.id"))
    canary_share: Mapped[float] = mapped_column(Float, default=0.0, server_default="0", doc="of conversations")
    canary_since: Mapped[float | None] = mapped_column(Float)
    canary_watched: Mapped[bool] = mapped_column(
        Boolean,
        default=False,
        server_default=false(),
        doc="the watch ends it, one way or the other; else a person does",
    )
