"""Project, ApiKey and ProjectUsage: a tenant, its credentials and what it has used."""

from sqlalchemy import BigInteger, ForeignKey, Index, String, true
from sqlalchemy.orm import Mapped, mapped_column

from app.models.base import Base, Created, Entity


class Project(Entity, Base):
    __tablename__ = "projects"

    name: Mapped[str] = mapped_column(String(63), unique=True)
    train: Mapped[bool] = mapped_column(default=True, server_default=true(), doc="consent to train on its turns")
    retention: Mapped[dict[str, object] | None] = mapped_column(
        doc="its own RetentionConfig fields; the deployment's where a field is missing"
    )
    token_secret: Mapped[str | None] = mapped_column(String(64), doc="signs the feedback tokens of its web pages")
    previous_token_secret: Mapped[str | None] = mapped_column(String(64), doc="verifies tokens, and signs none")
    previous_token_secret_until: Mapped[float | None]
    limits: Mapped[dict[str, object] | None] = mapped_column(
        doc="its own ProjectLimits fields; the deployment's where a field is missing"
    )


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


class ProjectUsage(Base):
    """What a project has used on one day, in UTC."""

    __tablename__ = "project_usage"

    project_id: Mapped[str] = mapped_column(ForeignKey("projects.id"), primary_key=True)
    day: Mapped[int] = mapped_column(primary_key=True, autoincrement=False, doc="days since the epoch")
    output_tokens: Mapped[int] = mapped_column(BigInteger, doc="of chats whose turns are processed")


class IdempotentRequest(Created, Base):
    """An admin's request with an Idempotency-Key that had an effect, and its response."""

    __tablename__ = "idempotent_requests"

    project_id: Mapped[str] = mapped_column(ForeignKey("projects.id"), primary_key=True)
    key: Mapped[str] = mapped_column(String(255), primary_key=True)
    request_id: Mapped[str] = mapped_column(String(48), doc="of the request that had the effect")
    fingerprint: Mapped[str] = mapped_column(String(64), doc="SHA-256 of method, path, query and body")
    status: Mapped[int | None] = mapped_column(doc="of the response; null until it is stored")
    response: Mapped[str | None] = mapped_column(doc="JSON; null also where it holds a secret")

    __table_args__ = (Index("ix_idempotent_requests_project_id_created_at", "project_id", "created_at"),)
