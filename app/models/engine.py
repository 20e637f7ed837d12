"""Engine: one SGLang replica and the versions that it has loaded."""

from enum import StrEnum

from sqlalchemy import Float, Integer, String, Text
from sqlalchemy.orm import Mapped, mapped_column

from app.models.base import Base, Json


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
    url: Mapped[str] = mapped_column(Text)
    state: Mapped[str] = mapped_column(String(16))
    incarnation: Mapped[int] = mapped_column(Integer, default=0)
    loaded: Mapped[list[str]] = mapped_column(Json, default=list, doc="names of the loaded adapters")
    weights: Mapped[str | None] = mapped_column(
        String(80), doc="the version whose full weights it has; null for the base model's weights"
    )
    swapping_until: Mapped[float | None] = mapped_column(
        Float, doc="until then its weights are being swapped; null when they are not"
    )
    heartbeat_at: Mapped[float | None] = mapped_column(Float)
    reason: Mapped[str | None] = mapped_column(Text)
