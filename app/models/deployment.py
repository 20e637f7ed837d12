"""Deployments: which version of a policy serves."""

from sqlalchemy import ForeignKey, false
from sqlalchemy.orm import Mapped, mapped_column

from app.models.base import Base


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
