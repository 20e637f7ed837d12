"""Versions: what the updates of a policy result in, from trained to served."""

from enum import StrEnum
from typing import NotRequired, TypedDict

from sqlalchemy import ColumnElement, ForeignKey, Index, String, UniqueConstraint, case, false
from sqlalchemy.ext.hybrid import hybrid_property
from sqlalchemy.orm import Mapped, mapped_column

from app.core.leases import LeaseMixin
from app.models.base import Base, Entity, Json, partial_index


class Probe(TypedDict):
    """Token ids and the log-probs that a version gives them, and those that its parent gives them."""

    ids: list[list[int]]
    logprobs: list[list[float]]
    parent_logprobs: NotRequired[list[list[float]]]  # missing in those of older releases and of base models


class VersionState(StrEnum):
    TRAINED = "trained"
    VERIFIED = "verified"
    SHADOW = "shadow"  # it answers live prompts, and nobody sees its replies
    SHADOW_PASSED = "shadow_passed"  # it may be published
    CANARY = "canary"  # it answers a share of the users, and its metrics are watched
    LIVE = "live"
    SUPERSEDED = "superseded"
    ROLLED_BACK = "rolled_back"
    REJECTED = "rejected"


PENDING_RELEASE = (VersionState.TRAINED, VersionState.VERIFIED, VersionState.SHADOW, VersionState.SHADOW_PASSED)
ONCE_LIVE = (VersionState.LIVE, VersionState.SUPERSEDED, VersionState.ROLLED_BACK)  # was deployed to everybody
SERVED_TRAFFIC = (*ONCE_LIVE, VersionState.CANARY)  # has answered users


class Version(Entity, LeaseMixin, Base):
    """An immutable result of an update. Version 0 is the base model: it has no adapter and no parent."""

    __tablename__ = "versions"

    policy_id: Mapped[str] = mapped_column(ForeignKey("policies.id"), index=True)
    number: Mapped[int]
    parent_id: Mapped[str | None] = mapped_column(ForeignKey("versions.id"))
    batch_id: Mapped[str | None] = mapped_column(String(48))
    state: Mapped[str] = mapped_column(String(16), index=True)
    reason: Mapped[str | None] = mapped_column(doc="why it was rejected or rolled back")
    adapter_name: Mapped[str | None] = mapped_column(String(80), unique=True)
    adapter_path: Mapped[str | None]
    full_weights: Mapped[bool] = mapped_column(
        default=False, server_default=false(), doc="all weights; else an adapter"
    )
    manifest_sha256: Mapped[str | None] = mapped_column(String(64))
    probe: Mapped[Probe | None] = mapped_column(Json, doc="token ids and their log-probs from the trainer")
    metrics: Mapped[dict[str, float]] = mapped_column(default=dict)
    timings: Mapped[dict[str, float]] = mapped_column(default=dict, doc="seconds by phase, from trained to served")
    shadow_since: Mapped[float | None]
    live_at: Mapped[float | None]
    pruned_at: Mapped[float | None] = mapped_column(doc="since when its files are deleted, and it cannot be deployed")
    tainted_at: Mapped[float | None] = mapped_column(
        doc="since when it, or one of its ancestors, has learned from data that is erased"
    )

    __table_args__ = (
        UniqueConstraint("policy_id", "number"),
        Index("ix_versions_parent_id", "parent_id"),
        partial_index("ix_versions_tainted", "policy_id", where="tainted_at IS NOT NULL"),
        partial_index("ix_versions_policy_id_live_at", "policy_id", "live_at", where="live_at IS NOT NULL"),
        partial_index(
            "ix_versions_with_files",
            *("policy_id", "number"),
            where="adapter_path IS NOT NULL AND pruned_at IS NULL",
        ),
    )

    @hybrid_property
    def adapter(self) -> str | None:
        """The adapter that a request to an engine names. None for the base model and for full weights."""
        return None if self.full_weights else self.adapter_name

    @adapter.inplace.expression
    @classmethod
    def _adapter_in_sql(cls) -> ColumnElement[str | None]:
        return case((~cls.full_weights, cls.adapter_name))

    @hybrid_property
    def weights(self) -> str | None:
        """The version whose full weights the engine must have. None for the base model's weights."""
        return self.adapter_name if self.full_weights else None

    @weights.inplace.expression
    @classmethod
    def _weights_in_sql(cls) -> ColumnElement[str | None]:
        return case((cls.full_weights, cls.adapter_name))
