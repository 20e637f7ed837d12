"""Pin: a conversation, user or key that is held on one version of a policy, whatever the pointer does."""

from enum import StrEnum

from sqlalchemy import ForeignKey, Index, String, Text
from sqlalchemy.orm import Mapped, mapped_column

from app.models.base import Base, Created


class PinKind(StrEnum):
    """What is pinned; of several pins that fit a request the first of these counts."""

    CONVERSATION = "conversation"
    USER = "user"
    KEY = "key"


class Pin(Created, Base):
    """`subject`: a conversation's id, an end user's as requests name them, or an API key's id."""

    __tablename__ = "pins"

    id: Mapped[str] = mapped_column(String(48), primary_key=True)
    project_id: Mapped[str] = mapped_column(ForeignKey("projects.id"))
    policy_id: Mapped[str] = mapped_column(ForeignKey("policies.id"))
    kind: Mapped[str] = mapped_column(String(16))
    subject: Mapped[str] = mapped_column(String(512))
    version_id: Mapped[str] = mapped_column(ForeignKey("versions.id"), index=True)
    reason: Mapped[str | None] = mapped_column(Text)
    actor: Mapped[str] = mapped_column(String(63), doc="whose key set it")

    __table_args__ = (
        Index("ix_pins_policy_id_kind_subject", "policy_id", "kind", "subject", unique=True),
        Index("ix_pins_project_id_kind_subject", "project_id", "kind", "subject"),
    )
