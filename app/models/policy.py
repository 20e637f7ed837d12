"""Policies: a base model with its versions."""

from enum import StrEnum

from sqlalchemy import ForeignKey, String, UniqueConstraint, false
from sqlalchemy.orm import Mapped, mapped_column

from app.models.base import Base, Entity


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
