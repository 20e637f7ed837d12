"""Sections of the processes around the model: server, database, broker, workers."""

import base64
import re

from pydantic import Field, SecretStr, field_validator

from alignment.config.frozen_model import Frozen
from app.core.database_url import normalise_url

ORIGIN = re.compile(r"https?://[^/?#\s]+|\*")  # what a browser sends in the header Origin
BROKER_SCHEMES = ("redis", "rediss", "sentinel", "amqp", "amqps", "pyamqp")


class ServerSettings(Frozen):
    """The HTTP API."""

    host: str = Field("127.0.0.1", description="address that the API listens on")
    port: int = Field(8700, ge=0, le=65535, description="port that the API listens on")
    max_body_bytes: int = Field(4 * 1024 * 1024, ge=1, description="largest request body")
    max_import_bytes: int = Field(256 * 1024 * 1024, ge=1, description="largest file of an import")
    max_body_seconds: float = Field(
        600.0, gt=0, description="how long a request's body may take to arrive; 256 MiB in 600 s are 3.6 Mbit/s"
    )
    chat_timeout_seconds: float = Field(600.0, gt=0, description="longest time of a reply")
    default_max_tokens: int = Field(
        512, ge=1, description="length limit of a reply in tokens when the request names none"
    )
    shutdown_delay_seconds: float = Field(
        5.0,
        ge=0,
        description="how long an API process still answers requests after SIGTERM, with /readyz at 503, so that load "
        "balancers stop sending them",
    )
    shutdown_seconds: int = Field(
        600, ge=1, description="how long the running replies of an API process may take to end after that"
    )
    route_cache_seconds: float = Field(
        0.02, ge=0, description="how long an API process may use a deployment that another process has changed"
    )
    key_cache_seconds: float = Field(
        1.0, ge=0, description="how long an API process may accept a key that another process has revoked"
    )
    cors_origins: list[str] = Field(
        [], description='origins of web pages that may call the API, e.g. ["https://shop.example"]; ["*"] for all'
    )
    console: bool = Field(True, description="serve the console at /console: pages for people, see docs/console.md")
    private_hosts: list[str] = Field(
        [], description='hosts in private networks that own rewards and webhooks may name, e.g. ["judge.internal"]'
    )

    @field_validator("cors_origins")
    @classmethod
    def _check_origins(cls, origins: list[str]) -> list[str]:
        for origin in origins:
            if ORIGIN.fullmatch(origin) is None:
                raise ValueError(
                    f"{origin!r} is no origin of a browser, which is a scheme and a host without a path or a final "
                    "slash, such as https://shop.example"
                )
        return origins


class LangfuseSettings(Frozen):
    """The intake of Langfuse's scores: what sends them to Langfuse may send them here; docs/connect/langfuse.md."""

    intake: bool = Field(False, description="serve Langfuse's routes for scores at /api/public")
    people: list[str] = Field(
        ["user-feedback", "user_feedback", "thumbs"],
        description="names of scores that people give; all others are those of programs",
    )
    ranges: dict[str, tuple[float, float]] = Field(
        {},
        description='lowest and highest value of numeric scores by name, e.g. {"quality": [0, 1]}; a score of another '
        "name is stored as a label, unless it is a thumb of people",
    )

    @field_validator("ranges")
    @classmethod
    def _check_ranges(cls, ranges: dict[str, tuple[float, float]]) -> dict[str, tuple[float, float]]:
        for name, (low, high) in ranges.items():
            if not -1e9 <= low < high <= 1e9:
                raise ValueError(f"{name}: the first number must be lower than the second")
        return ranges


class DatabaseSettings(Frozen):
    """Where all state is stored."""

    url: str | None = Field(
        None, description="postgresql://user:password@host/name, a SQLAlchemy URL; SQLite under `home` when unset"
    )
    owner_url: str | None = Field(
        None,
        description="PostgreSQL alone: the URL of the role that owns the tables, for `attune db` and `attune backup "
        "restore`. The role of `url` then cannot switch off the triggers of the audit log",
    )
    request_timeout_seconds: float = Field(
        5.0,
        ge=0.5,
        description="longest time of a statement in a request, and that it waits for SQLite's writer; the request is "
        "then answered with 503",
    )
    job_timeout_seconds: float = Field(
        20.0,
        ge=0.5,
        description="longest time of a statement in a worker, and that it waits for SQLite's writer; it tries again",
    )
    long_timeout_seconds: float = Field(
        300.0, ge=1, description="longest time of a statement in an export, an import or an erasure"
    )
    encryption_keys: tuple[SecretStr, ...] = Field(
        (),
        description="keys of 32 bytes in base64, a list or separated by commas, for secrets in the database: the first "
        "encrypts, all decrypt; a file under `home` when unset, which hosts that do not share `home` lack",
    )
    share_histories: bool = Field(
        True,
        description="store the messages and tokens that turns have in common once; off while processes of a release "
        "without this setting are still running",
    )

    @field_validator("url", "owner_url")
    @classmethod
    def _normalise_url(cls, value: str | None) -> str | None:
        return None if value is None else normalise_url(value)

    @field_validator("encryption_keys", mode="before")
    @classmethod
    def _parse_keys(cls, value: object) -> object:
        return [key.strip() for key in value.split(",") if key.strip()] if isinstance(value, str) else value

    @field_validator("encryption_keys")
    @classmethod
    def _check_keys(cls, value: tuple[SecretStr, ...]) -> tuple[SecretStr, ...]:
        for key in value:
            try:
                num_bytes = len(base64.b64decode(key.get_secret_value(), validate=True))
            except ValueError:
                num_bytes = 0
            if num_bytes != 32:
                raise ValueError("each key must be 32 bytes in base64, e.g. the output of `openssl rand -base64 32`")
        return value


class BrokerSettings(Frozen):
    """Where notifications of the workers are sent."""

    url: str | None = Field(None, description="Celery broker; a folder under `home` when unset")

    @field_validator("url")
    @classmethod
    def _check_scheme(cls, value: str | None) -> str | None:
        if value is not None and value.partition("://")[0] not in BROKER_SCHEMES:
            raise ValueError("it must be Redis or RabbitMQ, such as redis://host:6379/0 or amqp://user:password@host//")
        return value


class WorkerSettings(Frozen):
    """Jobs of the background workers."""

    lease_seconds: float = Field(
        20.0, gt=0, description="how long a job waits after its worker has died, before another one takes it"
    )
    max_attempts: int = Field(3, ge=1, description="attempts of a job before it is quarantined")
    reconcile_seconds: float = Field(2.0, gt=0, description="how often jobs whose notification was lost are looked for")
