"""Dataset: imported prompts or preferences to learn from."""

from enum import StrEnum
from typing import Any

from sqlalchemy import ForeignKey, Integer, String, UniqueConstraint
from sqlalchemy.orm import Mapped, mapped_column

from app.models.base import Base, Created, Json


class DatasetKind(StrEnum):
    PROMPTS = "prompts"
    PREFERENCES = "preferences"


class Dataset(Created, Base):
    __tablename__ = "datasets"

    id: Mapped[str] = mapped_column(String(48), primary_key=True)
    project_id: Mapped[str] = mapped_column(ForeignKey("projects.id"))
    name: Mapped[str] = mapped_column(String(63))
    kind: Mapped[str] = mapped_column(String(16))
    num_rows: Mapped[int] = mapped_column(Integer)
    sha256: Mapped[str] = mapped_column(String(64), doc="of the imported file: the same file is imported once")

    __table_args__ = (UniqueConstraint("project_id", "name"),)


class DatasetRow(Base):
    """One row. `content` holds `messages` and perhaps `reference` (prompts), or `messages`, `chosen` and `rejected`
    (preferences)."""

    __tablename__ = "dataset_rows"

    dataset_id: Mapped[str] = mapped_column(ForeignKey("datasets.id", ondelete="CASCADE"), primary_key=True)
    row_number: Mapped[int] = mapped_column(Integer, primary_key=True)
    content: Mapped[dict[str, Any]] = mapped_column(Json)
