"""Engines: where they are, and which versions they have loaded."""

from enum import StrEnum

from sqlalchemy import String
from sqlalchemy.orm import Mapped, mapped_column

from app.models.base import Base


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
        doc="by adapter: how often in a row it ended while it loaded it, see app/engines/load_errors.py"
    )
    reason: Mapped[str | None] = mapped_column(
        doc="why it is down; otherwise the versions that it could not load, see app/engines/load_errors.py"
    )
