"""Engine: one SGLang replica, and which versions it holds."""

from enum import StrEnum

from sqlalchemy import Float, Integer, String, Text
from sqlalchemy.orm import Mapped, mapped_column

from app.models.base import Base, Json


class EngineState(StrEnum):
    STARTING = "starting"
    READY = "ready"
    DOWN = "down"


class Engine(Base):
    """`incarnation` grows with every start: a writer who saw an older one has nothing to say about this one.

    Adapters lie beside each other; of full weights an engine has one version's. While they are exchanged, nobody is
    sent there. Whoever exchanges them holds `moving_until`, to the digit; when that has passed, another may.
    """

    __tablename__ = "engines"

    name: Mapped[str] = mapped_column(String(63), primary_key=True)
    url: Mapped[str] = mapped_column(Text)
    state: Mapped[str] = mapped_column(String(16))
    incarnation: Mapped[int] = mapped_column(Integer, default=0)
    loaded: Mapped[list[str]] = mapped_column(Json, default=list, doc="names of the adapters it holds")
    weights: Mapped[str | None] = mapped_column(
        String(80), doc="the version whose full weights it has; the base model's own when null"
    )
    swapping_until: Mapped[float | None] = mapped_column(Float, doc="its weights are being exchanged; null when not")
    heartbeat_at: Mapped[float | None] = mapped_column(Float)
    reason: Mapped[str | None] = mapped_column(Text)
