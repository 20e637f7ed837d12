"""Totals of rows that no longer change, so that no page counts all rows of a growing table."""

from sqlalchemy import BigInteger, ForeignKey, String, UniqueConstraint, text
from sqlalchemy.orm import Mapped, mapped_column

from app.models.base import Base, BigInt


class VoteTotal(Base):
    """The number of votes with one settled outcome. `Feedback.vote_total_id` says in which total a vote is counted."""

    __tablename__ = "vote_totals"

    id: Mapped[int] = mapped_column(BigInt, primary_key=True, autoincrement=True)
    policy_id: Mapped[str] = mapped_column(ForeignKey("policies.id"))
    reason: Mapped[str] = mapped_column(String(32), doc="an app.feedback.outcome_reasons.Reason")
    is_person: Mapped[bool]
    num_votes: Mapped[int] = mapped_column(BigInteger, default=0, server_default=text("0"))

    __table_args__ = (UniqueConstraint("policy_id", "reason", "is_person"),)


class VoteCursor(Base):
    """Up to which feedback the votes of a project were looked at; votes that still wait are passed over."""

    __tablename__ = "vote_cursors"

    project_id: Mapped[str] = mapped_column(ForeignKey("projects.id"), primary_key=True)
    seq: Mapped[int] = mapped_column(BigInt)


class RolloutTotal(Base):
    """The number and the tokens of a policy's settled rollouts with `counted`."""

    __tablename__ = "rollout_totals"

    policy_id: Mapped[str] = mapped_column(ForeignKey("policies.id"), primary_key=True)
    origin: Mapped[str] = mapped_column(String(16), primary_key=True)
    state: Mapped[str] = mapped_column(String(16), primary_key=True)
    num_rollouts: Mapped[int] = mapped_column(BigInteger)
    tokens: Mapped[int] = mapped_column(BigInteger)


class SampleTotal(Base):
    """The number of a policy's samples whose `counted_state` is this state."""

    __tablename__ = "sample_totals"

    policy_id: Mapped[str] = mapped_column(ForeignKey("policies.id"), primary_key=True)
    state: Mapped[str] = mapped_column(String(16), primary_key=True)
    num_samples: Mapped[int] = mapped_column(BigInteger)


class UnmatchedVotes(Base):
    """The number of votes that a connector has sent and that are about no reply of the project."""

    __tablename__ = "unmatched_votes"

    project_id: Mapped[str] = mapped_column(ForeignKey("projects.id"), primary_key=True)
    connector: Mapped[str] = mapped_column(String(32), primary_key=True)
    reason: Mapped[str] = mapped_column(String(32), primary_key=True, doc="an app.feedback.unmatched.Reason")
    num_votes: Mapped[int] = mapped_column(BigInteger, doc="each arrival counts, repetitions included")
    last_at: Mapped[float] = mapped_column(doc="when the newest came, seconds since the epoch, database clock")


class TokenCount(Base):
    """The browser tokens that a key has created in a minute. When it has ended, the row becomes an audit entry."""

    __tablename__ = "token_counts"

    project_id: Mapped[str] = mapped_column(ForeignKey("projects.id"), primary_key=True)
    actor: Mapped[str] = mapped_column(String(128), primary_key=True, doc="the API key's prefix")
    minute: Mapped[int] = mapped_column(primary_key=True, autoincrement=False, index=True, doc="since the epoch")
    num_tokens: Mapped[int]
