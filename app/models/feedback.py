"""Feedback and its raters. Feedback is append-only: the latest per target, name and source is the effective one."""

from enum import StrEnum

from sqlalchemy import ForeignKey, Index, String, UniqueConstraint, text
from sqlalchemy.orm import Mapped, mapped_column

from alignment.signals.combine_rewards import NUMERIC_KINDS
from app.models.base import Base, BigInt, Created, Json, partial_index

RANKING_KINDS = ("comparison", "ranking")  # kinds of feedback that put several turns in order
VOTE_KINDS = (*NUMERIC_KINDS, *RANKING_KINDS, "correction", "categorical")  # kinds that may give a reward


class SourceKind(StrEnum):
    """Who gave the feedback."""

    HUMAN = "HUMAN"
    LLM_JUDGE = "LLM_JUDGE"
    CODE = "CODE"


class Feedback(Created, Base):
    """What a source said about a turn, a conversation, an episode, or the turns that it ranks (FeedbackRank)."""

    __tablename__ = "feedback"

    seq: Mapped[int] = mapped_column(BigInt, primary_key=True, autoincrement=True, doc="order of arrival")
    id: Mapped[str] = mapped_column(String(48), unique=True)
    project_id: Mapped[str] = mapped_column(ForeignKey("projects.id"))
    turn_id: Mapped[str | None] = mapped_column(ForeignKey("turns.id"), index=True)
    conversation_id: Mapped[str | None] = mapped_column(String(255))
    episode_id: Mapped[str | None] = mapped_column(String(48), doc="of feedback on an episode as a whole")
    target: Mapped[str] = mapped_column(
        String(300),
        nullable=True,
        doc="what the feedback is about, as one string: the latest per target, name and source is effective",
    )
    kind: Mapped[str] = mapped_column(String(16))
    name: Mapped[str] = mapped_column(String(63))
    value: Mapped[float | None] = mapped_column(doc="binary: 1 or -1; score and rating: in [-1, 1]")
    raw_value: Mapped[object | None] = mapped_column(Json, doc="the value as it was sent; null for a withdrawal")
    comment: Mapped[str | None]
    source_kind: Mapped[str] = mapped_column(String(16))
    source_id: Mapped[str | None] = mapped_column(String(255))
    request_metadata: Mapped[dict[str, object]] = mapped_column(default=dict, doc="the caller's metadata")
    idempotency_key: Mapped[str] = mapped_column(String(255))
    fingerprint: Mapped[str] = mapped_column(String(64), doc="SHA-256 of the request body with this key")
    token_id: Mapped[str | None] = mapped_column(String(48), doc="the browser token that it was submitted with")
    withdraws: Mapped[str | None] = mapped_column(String(48), doc="of a withdrawal: the id of the feedback withdrawn")
    processed: Mapped[bool] = mapped_column(default=False)
    text_rule: Mapped[str | None] = mapped_column(
        String(32), doc="of a correction: why its text is not learned from, a TextRule"
    )
    emptied_at: Mapped[float | None] = mapped_column(doc="when its text and its source were removed; the row remains")
    batch_id: Mapped[str | None] = mapped_column(
        ForeignKey("batches.id"), doc="the batch that learns or has learned from it; null when its samples returned"
    )
    vote_total_id: Mapped[int | None] = mapped_column(
        BigInt,
        doc="the VoteTotal that it is counted in; null while its outcome may change, see app/training/vote_totals.py",
    )

    __table_args__ = (
        UniqueConstraint("project_id", "idempotency_key"),
        Index(
            "ix_feedback_project_id_seq",
            *("project_id", "seq"),
            postgresql_where=text("NOT processed"),
            sqlite_where=text("processed = 0"),
        ),
        Index("ix_feedback_of_target", "project_id", "target", "source_kind", "source_id", "name", "seq"),
        Index("ix_feedback_project_id_conversation_id", "project_id", "conversation_id"),
        partial_index("ix_feedback_of_episode", "project_id", "episode_id", where="episode_id IS NOT NULL"),
        partial_index("ix_feedback_project_id_created_at", "project_id", "created_at", where="emptied_at IS NULL"),
        partial_index(
            "ix_feedback_uncounted_votes",
            *("project_id", "seq"),
            where="vote_total_id IS NULL AND kind NOT IN ('comment', 'withdrawal')",
        ),
        partial_index("ix_feedback_batch_id", "batch_id", where="batch_id IS NOT NULL"),
        partial_index("ix_feedback_of_source", "project_id", "source_id", "seq", where="source_id IS NOT NULL"),
        Index("ix_feedback_of_project", "project_id", "seq"),
        partial_index("ix_feedback_withdraws", "project_id", "withdraws", where="withdraws IS NOT NULL"),
    )


class FeedbackRank(Base):
    """One turn of a comparison or a ranking: rank 0 is the best, equal ranks are ties."""

    __tablename__ = "feedback_ranks"

    feedback_seq: Mapped[int] = mapped_column(BigInt, ForeignKey("feedback.seq"), primary_key=True)
    turn_id: Mapped[str] = mapped_column(ForeignKey("turns.id"), primary_key=True, index=True)
    rank: Mapped[int]


class FeedbackKey(Base):
    """A key of a sender, and the newest feedback that has it; see app/feedback/keyed_feedback.py."""

    __tablename__ = "feedback_keys"

    project_id: Mapped[str] = mapped_column(ForeignKey("projects.id"), primary_key=True)
    key: Mapped[str] = mapped_column(String(255), primary_key=True)
    feedback_id: Mapped[str | None] = mapped_column(
        String(48), index=True, doc="null if it was withdrawn before it arrived"
    )
    sent_at: Mapped[float | None] = mapped_column(
        doc="the latest `sent_at` of its changes, seconds since the epoch, the sender's clock"
    )
    revision: Mapped[int] = mapped_column(doc="the number of rows of feedback that it has had")


class RaterStanding(StrEnum):
    NORMAL = "normal"
    TRUSTED = (
        "trusted"  # known to the operator: weight 1, not doubted, and (with ATTUNE_RATERS__TRUST) no cap per rater
    )
    QUARANTINED = "quarantined"  # too much or too unusual feedback: its samples wait for an admin
    BLOCKED = "blocked"  # set by an admin: its feedback is stored and never trained on


class Rater(Created, Base):
    """A person, a program or a judge, as the feedback names it. Its counts are updated when its feedback is curated."""

    __tablename__ = "raters"

    project_id: Mapped[str] = mapped_column(ForeignKey("projects.id"), primary_key=True)
    name: Mapped[str] = mapped_column(String(320), primary_key=True, doc='example: "HUMAN/user-7"')
    standing: Mapped[str] = mapped_column(String(16), default=RaterStanding.NORMAL)
    reason: Mapped[str | None] = mapped_column(doc="why it has this standing")
    num_up: Mapped[int] = mapped_column(BigInt, default=0, doc="rewards above 0, of all time")
    num_down: Mapped[int] = mapped_column(BigInt, default=0, doc="rewards below 0")
    agreement_weight: Mapped[float] = mapped_column(
        default=0.0, doc="total weight of its rewards with which others agreed"
    )
    disagreement_weight: Mapped[float] = mapped_column(default=0.0)
    counted_day: Mapped[int] = mapped_column(default=0, doc="days since the epoch, database clock")
    num_today: Mapped[int] = mapped_column(default=0, doc="rewards on that day")

    __table_args__ = (Index("ix_raters_project_id_standing", "project_id", "standing"),)
