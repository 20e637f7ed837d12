"""Project and ApiKey: a tenant, and how it says who it is."""

from sqlalchemy import Float, ForeignKey, String
from sqlalchemy.orm import Mapped, mapped_column

from app.models.base import Base, Created, Json


class Project(Created, Base):
    __tablename__ = "projects"

    id: Mapped[str] = mapped_column(String(48), primary_key=True)
    name: Mapped[str] = mapped_column(String(63), unique=True)


class ApiKey(Created, Base):
    """Only the hash is kept: a key has 256 random bits, so SHA-256 needs no salt and no slowness."""

    __tablename__ = "api_keys"

    id: Mapped[str] = mapped_column(String(48), primary_key=True)
    project_id: Mapped[str] = mapped_column(ForeignKey("projects.id"), index=True)
    prefix: Mapped[str] = mapped_column(String(24))
    sha256: Mapped[str] = mapped_column(String(64), unique=True)
    scopes: Mapped[list[str]] = mapped_column(Json)
    revoked_at: Mapped[float | None] = mapped_column(Float)
