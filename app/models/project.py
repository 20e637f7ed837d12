"""Project and ApiKey: a tenant and its credentials."""

from sqlalchemy import ForeignKey, String, true
from sqlalchemy.orm import Mapped, mapped_column

from app.models.base import Base, Entity


class Project(Entity, Base):
    __tablename__ = "projects"

    name: Mapped[str] = mapped_column(String(63), unique=True)
    train: Mapped[bool] = mapped_column(default=True, server_default=true(), doc="consent to train on its turns")
    token_secret: Mapped[str | None] = mapped_column(String(64), doc="signs the feedback tokens of its web pages")


class ApiKey(Entity, Base):
    """Only the hash is stored. A key has 256 random bits, so SHA-256 needs neither a salt nor many rounds."""

    __tablename__ = "api_keys"

    project_id: Mapped[str] = mapped_column(ForeignKey("projects.id"), index=True)
    prefix: Mapped[str] = mapped_column(String(24))
    sha256: Mapped[str] = mapped_column(String(64), unique=True)
    name: Mapped[str | None] = mapped_column(String(63), doc="the owner's label")
    scopes: Mapped[list[str]]
    train: Mapped[bool | None] = mapped_column(doc="consent to train on this key's turns; the project's when null")
    requests_per_minute: Mapped[int | None] = mapped_column(doc="the deployment's limit when null")
    max_concurrency: Mapped[int | None] = mapped_column(doc="the deployment's limit when null")
    expires_at: Mapped[float | None]
    revoked_at: Mapped[float | None]
