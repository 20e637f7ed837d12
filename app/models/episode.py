"""Episode: one attempt of an agent at one task, with all its turns, its limits and its outcome."""

from enum import StrEnum

from sqlalchemy import ForeignKey, Index, String, false, text
from sqlalchemy.orm import Mapped, mapped_column

from app.models.base import Base, Entity, partial_index


class EpisodeState(StrEnum):
    OPEN = "open"
    ENDED = "ended"  # it has no further turns; feedback on it is learned from


class EpisodeSampling(StrEnum):
    """How the replies of an episode are sampled."""

    REQUEST = "request"  # as each request asks
    POLICY = "policy"  # from the policy's own distribution, whatever a request asks: they can be trained on


class VersionRule(StrEnum):
    """Which version answers the chats of an episode after its first one."""

    FOLLOW = "follow"  # the one that the deployment serves
    LEASH = "leash"  # that of the first chat, while it is loaded and not too far behind
    PIN = "pin"  # that of the first chat, or none


class ServiceTier(StrEnum):
    """Which requests an engine serves first, in OpenAI's terms."""

    DEFAULT = "default"
    FLEX = "flex"  # behind those of the default tier


class EndReason(StrEnum):
    """Why an episode has ended."""

    COMPLETED = "completed"  # the agent stopped by itself, or its environment stopped it
    FAILED = "failed"  # the agent gave up, or an error of its own stopped it
    ABANDONED = "abandoned"  # nobody can tell how it went: the client left
    INFRASTRUCTURE = "infrastructure"  # an engine, a sandbox, the environment or the host of a tool was down
    IDLE_TIMEOUT = "idle_timeout"
    DEADLINE = "deadline"
    MAX_TURNS = "max_turns"
    MAX_TOKENS = "max_tokens"


LOST_REASONS = (EndReason.ABANDONED, EndReason.INFRASTRUCTURE)  # that say nothing of how the agent did
LIMIT_REASONS = (EndReason.MAX_TURNS, EndReason.MAX_TOKENS, EndReason.DEADLINE)  # that a client may report, too
REPORTED_REASONS = (EndReason.COMPLETED, EndReason.FAILED, *LOST_REASONS)  # the others are limits


class Episode(Entity, Base):
    """Its turns name it (`Turn.episode_id`). Feedback may name it as a whole (`Feedback.episode_id`)."""

    __tablename__ = "episodes"

    project_id: Mapped[str] = mapped_column(ForeignKey("projects.id"))
    policy_id: Mapped[str] = mapped_column(ForeignKey("policies.id"))
    key_id: Mapped[str] = mapped_column(String(48), doc="the API key that created it, for which its own key acts")
    key_sha256: Mapped[str] = mapped_column(String(64), unique=True, doc="of the episode's own key")
    task: Mapped[str | None] = mapped_column(String(255), doc="the caller's name of the task")
    request_metadata: Mapped[dict[str, str]] = mapped_column(default=dict, doc="the caller's metadata")
    group_id: Mapped[str | None] = mapped_column(String(255), doc="the caller's name of attempts at the same task")
    group_size: Mapped[int | None] = mapped_column(doc="how many episodes the group is planned to have")
    trace_id: Mapped[str | None] = mapped_column(String(32), doc="of W3C's Trace Context: its chats are found by it")
    sampling: Mapped[str | None] = mapped_column(String(16), doc="an EpisodeSampling; null: as each request asks")
    state: Mapped[str] = mapped_column(String(16), default=EpisodeState.OPEN)
    end_reason: Mapped[str | None] = mapped_column(String(16))
    reported_reason: Mapped[str | None] = mapped_column(
        String(16), doc="the EndReason of the report, which comes after the end where a limit of its own has ended it"
    )
    ended_at: Mapped[float | None]
    outcome: Mapped[float | None] = mapped_column(doc="in [-1, 1], as the caller reported it at the end")
    end_fingerprint: Mapped[str | None] = mapped_column(
        String(64), doc="SHA-256 of the report of its end; null while nobody has reported one"
    )
    start_version_id: Mapped[str | None] = mapped_column(String(48), doc="the version of its first turn")
    version_rule: Mapped[str | None] = mapped_column(String(16), doc="a VersionRule; null: follow")
    max_staleness: Mapped[int | None] = mapped_column(
        doc="with leash: how many versions the first one may be behind the one that serves; null: any number"
    )
    service_tier: Mapped[str | None] = mapped_column(String(16), doc="a ServiceTier; null: as each request asks")
    idle_seconds: Mapped[float] = mapped_column(doc="it ends when no turn runs for so long")
    deadline_at: Mapped[float] = mapped_column(doc="it ends then at the latest")
    max_turns: Mapped[int | None] = mapped_column(doc="most completions; null: no limit")
    max_tokens: Mapped[int | None] = mapped_column(doc="most output tokens of all turns together; null: no limit")
    idempotency_key: Mapped[str | None] = mapped_column(String(255), doc="of the request that created it")
    fingerprint: Mapped[str] = mapped_column(String(64), doc="SHA-256 of the body of that request")
    processed: Mapped[bool] = mapped_column(
        default=False, server_default=false(), doc="curation has updated the samples that waited for its end"
    )
    erased_at: Mapped[float | None] = mapped_column(doc="when its task and its metadata were erased; the row remains")

    __table_args__ = (
        Index("ix_episodes_project_id_created_at", "project_id", "created_at", "id"),
        partial_index(
            "ix_episodes_idempotency_key",
            *("key_id", "idempotency_key"),
            where="idempotency_key IS NOT NULL",
            unique=True,
        ),
        partial_index("ix_episodes_open", "deadline_at", where="state = 'open'"),
        partial_index(
            "ix_episodes_pinned", "policy_id", "start_version_id", where="state = 'open' AND version_rule = 'pin'"
        ),
        Index(
            "ix_episodes_unprocessed",
            *("ended_at", "id"),
            postgresql_where=text("state = 'ended' AND NOT processed"),
            sqlite_where=text("state = 'ended' AND processed = 0"),
        ),
        partial_index("ix_episodes_trace_id", "project_id", "trace_id", where="trace_id IS NOT NULL"),
        partial_index("ix_episodes_group_id", "project_id", "group_id", where="group_id IS NOT NULL"),
        partial_index(
            "ix_episodes_of_group",
            *("project_id", "group_id", "created_at", "id"),
            where="group_id IS NOT NULL",
        ),
    )
