"""Policies and versions, and what serves them: deployments, pins and engines."""

from enum import StrEnum
from typing import NotRequired, TypedDict

from sqlalchemy import ForeignKey, Index, String, UniqueConstraint, false
from sqlalchemy.orm import Mapped, mapped_column

from app.core.leases import LeaseMixin
from app.models.base import Base, Entity, Json, partial_index


class Probe(TypedDict):
    """Token ids and the log-probs that a version gives them, and those that its parent gives them."""

    ids: list[list[int]]
    logprobs: list[list[float]]
    parent_logprobs: NotRequired[list[list[float]]]  # missing in those of older releases and of base models


class PolicyState(StrEnum):
    """What a policy does. app/deployments/policy_states.py makes the transitions."""

    ACTIVE = "active"
    PAUSED = "paused"  # it answers chats, and is not trained
    ARCHIVED = "archived"  # it answers no chats, and is not listed; its versions are kept
    DELETED = "deleted"  # the row remains for the turns that refer to it; retention removes the files


ANSWERING = (PolicyState.ACTIVE, PolicyState.PAUSED)


class LearningMode(StrEnum):
    """How a policy learns. app/training/kl_guard.py makes the transitions."""

    ASYNCHRONOUS = "asynchronous"  # on samples of the last few versions
    SYNCHRONOUS = "synchronous"  # after an alarm: one update on samples of the serving version only
    HALTED = "halted"  # after repeated alarms, or by an operator: no batch is assembled


class ConversationRouting(StrEnum):
    """Which version continues a conversation when another version is deployed."""

    FOLLOW = "follow"  # the new version answers the next turn
    STICKY = "sticky"  # the version that began it, unless that is rolled back or no longer loaded


class Policy(Entity, Base):
    """A base model with its versions. The head is the version that the next update starts from; it may be newer than
    the serving one."""

    __tablename__ = "policies"

    project_id: Mapped[str] = mapped_column(ForeignKey("projects.id"), index=True)
    name: Mapped[str] = mapped_column(String(63))
    base_model: Mapped[str]
    head_version_id: Mapped[str | None] = mapped_column(String(48))
    state: Mapped[str] = mapped_column(String(16), default=PolicyState.ACTIVE, server_default=PolicyState.ACTIVE)
    state_reason: Mapped[str | None]
    state_since: Mapped[float | None] = mapped_column(doc="null if it has been active from the beginning")
    traffic_from_id: Mapped[str | None] = mapped_column(
        String(48), doc="the policy of whose requests it answers a share; null for none"
    )
    traffic_share: Mapped[float | None] = mapped_column(doc="of the end users and conversations")
    settings: Mapped[dict[str, object] | None] = mapped_column(
        doc="its own values of the sections algorithm, trainer and release; see app/policies/overrides.py"
    )
    rewards: Mapped[dict[str, object] | None] = mapped_column(doc="its own values of the section; null for none")
    rollouts: Mapped[dict[str, object] | None] = mapped_column(doc="its own values of the section; null for none")
    mode: Mapped[str] = mapped_column(
        String(16), default=LearningMode.ASYNCHRONOUS, server_default=LearningMode.ASYNCHRONOUS
    )
    mode_reason: Mapped[str | None]
    mode_since: Mapped[float | None]
    kl_alarms: Mapped[int] = mapped_column(default=0, server_default="0", doc="consecutive alarms of the KL guard")
    conversations: Mapped[str] = mapped_column(
        String(16), default=ConversationRouting.FOLLOW, server_default=ConversationRouting.FOLLOW
    )
    feedback_share: Mapped[float | None] = mapped_column(
        doc="of the newest replies that people gave feedback on; null before there are enough replies"
    )
    sparse_feedback: Mapped[bool] = mapped_column(
        default=False,
        server_default=false(),
        doc="few replies get feedback; it counts with ATTUNE_FEEDBACK=auto",
    )
    feedback_measured_at: Mapped[float | None]
    canary: Mapped[dict[str, object] | None] = mapped_column(doc="its own values of release.canary; null for none")
    shadow: Mapped[dict[str, object] | None] = mapped_column(doc="its own values of release.shadow; null for none")

    __table_args__ = (UniqueConstraint("project_id", "name"),)


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

    @property
    def adapter(self) -> str | None:
        """The adapter that a request to an engine names. None for the base model and for full weights."""
        return None if self.full_weights else self.adapter_name

    @property
    def weights(self) -> str | None:
        """The version whose full weights the engine must have. None for the base model's weights."""
        return self.adapter_name if self.full_weights else None


class Deployment(Base):
    """Which version serves a policy, and which is its canary. Publishing and rolling back are one UPDATE of this row;
    `epoch` counts them."""

    __tablename__ = "deployments"

    policy_id: Mapped[str] = mapped_column(ForeignKey("policies.id"), primary_key=True)
    version_id: Mapped[str] = mapped_column(ForeignKey("versions.id"))
    previous_version_id: Mapped[str | None] = mapped_column(ForeignKey("versions.id"))
    epoch: Mapped[int] = mapped_column(default=0)
    changed_at: Mapped[float | None]
    canary_version_id: Mapped[str | None] = mapped_column(ForeignKey("versions.id"))
    canary_share: Mapped[float] = mapped_column(default=0.0, server_default="0", doc="of conversations")
    canary_since: Mapped[float | None]
    canary_watched: Mapped[bool] = mapped_column(
        default=False, server_default=false(), doc="its metrics promote it or roll it back; otherwise a person does"
    )


class PinKind(StrEnum):
    """What is pinned. If several pins match a request, the first kind in this order decides."""

    CONVERSATION = "conversation"
    USER = "user"
    KEY = "key"


class Pin(Entity, Base):
    """`subject` is a conversation's id, an end user as requests name them, or an API key's id."""

    __tablename__ = "pins"

    project_id: Mapped[str] = mapped_column(ForeignKey("projects.id"))
    policy_id: Mapped[str] = mapped_column(ForeignKey("policies.id"))
    kind: Mapped[str] = mapped_column(String(16))
    subject: Mapped[str] = mapped_column(String(512))
    version_id: Mapped[str] = mapped_column(ForeignKey("versions.id"), index=True)
    reason: Mapped[str | None]
    actor: Mapped[str] = mapped_column(String(63), doc="the prefix of the API key that set it")

    __table_args__ = (
        Index("ix_pins_policy_id_kind_subject", "policy_id", "kind", "subject", unique=True),
        Index("ix_pins_project_id_kind_subject", "project_id", "kind", "subject"),
    )


class EngineState(StrEnum):
    STARTING = "starting"
    READY = "ready"
    DOWN = "down"


class Engine(Base):
    """`incarnation` grows with every start, and a write that names an older one is refused.

    An engine holds several adapters, but the full weights of one version only. While its weights are swapped, no
    request is routed to it. The process that swaps them owns the exact value of `swapping_until`; after that moment
    another process may swap.
    """

    __tablename__ = "engines"

    name: Mapped[str] = mapped_column(String(63), primary_key=True)
    url: Mapped[str]
    kind: Mapped[str] = mapped_column(
        String(16), default="sglang", server_default="sglang", doc="which server it is, and so which client it has"
    )
    state: Mapped[str] = mapped_column(String(16))
    incarnation: Mapped[int] = mapped_column(default=0)
    loaded: Mapped[list[str]] = mapped_column(default=list, doc="names of the loaded adapters")
    weights: Mapped[str | None] = mapped_column(
        String(80), doc="the version whose full weights it has; null for the base model's weights"
    )
    swapping_until: Mapped[float | None] = mapped_column(doc="until when its weights are being swapped, if they are")
    heartbeat_at: Mapped[float | None]
    load_crashes: Mapped[dict[str, object] | None] = mapped_column(
        doc="by adapter: how often in a row it ended while it loaded it, see app/policies/load_errors.py"
    )
    reason: Mapped[str | None] = mapped_column(
        doc="why it is down; otherwise the versions that it could not load, see app/policies/load_errors.py"
    )
