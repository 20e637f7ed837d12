"""Pin: a conversation, end user or API key that one version of a policy answers, whatever is deployed."""

from enum import StrEnum

from sqlalchemy import ForeignKey, Index, String, Text
from sqlalchemy.orm import Mapped, mapped_column

from app.models.base import Base, Created


class PinKind(StrEnum):
    """What is pinned. If several pins match a request, the first kind in this order decides."""

    CONVERSATION = "conversation"
    USER = "user"
    KEY = "key"


class Pin(Created, Base):
    """`subject` is a conversation's id, an end user as requests name them, or an API key's id."""

    __tablename__ = "pins"

    id: Mapped[str] = mapped_column(String(48), primary_key=True)
    project_id: Mapped[str] = mapped_column(ForeignKey("projects.id"))
    policy_id: Mapped[str] = mapped_column(ForeignKey("policies.id"))
    kind: Mapped[str] = mapped_column(String(16))
    subject: Mapped[str] = mapped_column(String(512))
    version_id: Mapped[str] = mapped_column(ForeignKey("versions.id"), index=True)
    reason: Mapped[str | None] = mapped_column(Text)
    actor: Mapped[str] = mapped_column(String(63), doc="the prefix of the API key that set it")

    __table_args__ = (
        Index("ix_pins_policy_id_kind_subject", "policy_id", "kind", "subject", unique=True),
        Index("ix_pins_project_id_kind_subject", "project_id", "kind", "subject"),
    )
