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
    """`incarnation` grows with every start: a writer who saw an older one has nothing to say about this one."""

    __tablename__ = "engines"

    name: Mapped[str] = mapped_column(String(63), primary_key=True)
    url: Mapped[str] = mapped_column(Text)
    state: Mapped[str] = mapped_column(String(16))
    incarnation: Mapped[int] = mapped_column(Integer, default=0)
    loaded: Mapped[list[str]] = mapped_column(Json, default=list, doc="names of the adapters it holds")
    heartbeat_at: Mapped[float | None] = mapped_column(Float)
    reason: Mapped[str | None] = mapped_column(Text)
