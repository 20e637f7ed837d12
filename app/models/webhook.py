"""Webhook endpoints of a project, and the deliveries to them."""

from enum import StrEnum

from sqlalchemy import ForeignKey, Index, String, Text, UniqueConstraint, text
from sqlalchemy.orm import Mapped, mapped_column

from app.core.leases import LeaseMixin
from app.models.base import Base, BigInt, Created, Entity, partial_index


class WebhookEndpoint(Entity, Base):
    """A URL that receives events. Events are audit entries, which are read up to `last_chain_number` of their chain.

    `retry_at` is set while it fails: until then nothing is sent to it, and afterwards one delivery at a time.
    """

    __tablename__ = "webhook_endpoints"

    project_id: Mapped[str] = mapped_column(ForeignKey("projects.id"), index=True)
    url: Mapped[str]
    description: Mapped[str | None] = mapped_column(String(255), doc="the owner's label")
    events: Mapped[list[str]] = mapped_column(doc="audit actions")
    secret: Mapped[str] = mapped_column(String(128), doc="signs deliveries; encrypted, see app/core/encryption.py")
    previous_secret: Mapped[str | None] = mapped_column(String(128), doc="signs them too until it expires; encrypted")
    previous_secret_until: Mapped[float | None]
    last_chain_number: Mapped[int] = mapped_column(BigInt, default=0, server_default=text("0"))
    failures: Mapped[int] = mapped_column(default=0, server_default=text("0"), doc="attempts since the last success")
    failing_since: Mapped[float | None]
    retry_at: Mapped[float | None]
    disabled_at: Mapped[float | None]
    disabled_reason: Mapped[str | None]


class WebhookDeliveryState(StrEnum):
    OPEN = "open"  # to be sent; claimed while its lease is in force
    DONE = "done"  # the receiver answered with a 2xx status
    SKIPPED = "skipped"  # the endpoint was disabled
    FAILED = "failed"  # every attempt failed


class WebhookDelivery(Created, LeaseMixin, Base):
    """One event for one endpoint. `id` is the webhook-id of every attempt, and `body` has the same bytes each time."""

    __tablename__ = "webhook_deliveries"

    id: Mapped[str] = mapped_column(String(48), primary_key=True, sort_order=-1)
    endpoint_id: Mapped[str] = mapped_column(ForeignKey("webhook_endpoints.id", ondelete="CASCADE"))
    audit_seq: Mapped[int] = mapped_column(BigInt, doc="the audit entry")
    event: Mapped[str] = mapped_column(String(64))
    body: Mapped[str] = mapped_column(Text)
    state: Mapped[str] = mapped_column(String(16), default=WebhookDeliveryState.OPEN)
    due_at: Mapped[float] = mapped_column(doc="it is not sent before")
    status_code: Mapped[int | None] = mapped_column(doc="of the last answer")
    reason: Mapped[str | None] = mapped_column(doc="why the last attempt failed")
    settled_at: Mapped[float | None]

    __table_args__ = (
        UniqueConstraint("endpoint_id", "audit_seq"),
        partial_index("ix_webhook_deliveries_due_at", "due_at", where="state = 'open'"),
        Index("ix_webhook_deliveries_endpoint_id_created_at", "endpoint_id", "created_at"),
        Index("ix_webhook_deliveries_settled_at", "settled_at"),
    )
