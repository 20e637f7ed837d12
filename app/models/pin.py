"""Pins: which conversations, end users and keys keep a version."""

from enum import StrEnum

from sqlalchemy import ForeignKey, Index, String
from sqlalchemy.orm import Mapped, mapped_column

from app.models.base import Base, Entity


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
