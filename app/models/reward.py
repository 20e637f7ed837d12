"""Rewards and the sources that give them off the hot path: judgements, and reward models fitted on feedback."""

from enum import StrEnum
from typing import TypedDict

from sqlalchemy import ForeignKey, Index, String, UniqueConstraint
from sqlalchemy.orm import Mapped, mapped_column

from app.core.leases import LeaseMixin
from app.models.base import Base, BigInt, Entity, Json, partial_index


class Reward(Entity, Base):
    """A number per turn and source. A turn's rewards are combined when its sample is built."""

    __tablename__ = "rewards"

    turn_id: Mapped[str] = mapped_column(ForeignKey("turns.id"))
    source: Mapped[str] = mapped_column(
        doc="of feedback: name/kind/id of its source; otherwise the reward source's name in the policy's configuration"
    )
    reward_source: Mapped[str] = mapped_column(
        String(63), server_default="explicit", doc="the reward source in the policy's configuration that it belongs to"
    )
    feedback_seq: Mapped[int | None] = mapped_column(
        BigInt, doc="the feedback that it comes from; null for a judgement's"
    )
    rater: Mapped[str | None] = mapped_column(String(320), doc="the rater behind it; null for a machine's")
    value: Mapped[float]
    weight: Mapped[float] = mapped_column(default=1.0, server_default="1", doc="trust in its rater or model, 0 to 1")

    __table_args__ = (
        UniqueConstraint("turn_id", "source"),
        Index("ix_rewards_feedback_seq_turn_id", "feedback_seq", "turn_id"),
    )


class JudgementState(StrEnum):
    OPEN = "open"  # to be requested once it is due; claimed while its lease is in force
    DONE = "done"
    SKIPPED = "skipped"  # the source gave no value, or its budget was spent
    FAILED = "failed"  # every attempt failed


class JudgementDetails(TypedDict, total=False):
    """What a judgement took: requests of all attempts, and tokens and seconds of the last one."""

    requests: int
    tokens: int
    seconds: float
    explanation: str  # of the source
    reward_model: str  # the id of the one that gave it
    number: int  # of that model
    weight: float  # that the model's rewards have


class Judgement(Entity, LeaseMixin, Base):
    """A request to one reward source for its judgement of a turn, sent off the hot path. Its value becomes a reward."""

    __tablename__ = "judgements"

    turn_id: Mapped[str] = mapped_column(ForeignKey("turns.id"))
    policy_id: Mapped[str] = mapped_column(ForeignKey("policies.id"))
    source: Mapped[str] = mapped_column(String(63), doc="its name in the policy's reward configuration")
    state: Mapped[str] = mapped_column(String(16), default=JudgementState.OPEN)
    due_at: Mapped[float] = mapped_column(doc="the request is not sent before")
    value: Mapped[float | None] = mapped_column(doc="in [-1, 1]")
    details: Mapped[JudgementDetails] = mapped_column(
        Json, default=dict, doc="usage, the source's reason, the reward model"
    )
    reason: Mapped[str | None] = mapped_column(doc="why it was skipped or failed")
    settled_at: Mapped[float | None]

    __table_args__ = (
        UniqueConstraint("turn_id", "source"),
        partial_index("ix_judgements_due_at", "due_at", where="state = 'open'"),
        partial_index("ix_judgements_policy_id_due_at", "policy_id", "due_at", where="state = 'open'"),
        Index("ix_judgements_policy_id_source_settled_at", "policy_id", "source", "settled_at"),
    )


class RewardModelState(StrEnum):
    OPEN = "open"  # to be fitted; claimed while its lease is in force
    TRAINED = "trained"  # good enough, but not requested to serve
    SERVING = "serving"  # its rewards count; at most one per policy
    DISABLED = "disabled"  # people disagreed with it, its files are damaged, or an operator disabled it
    RETIRED = "retired"  # a later one serves
    REFUSED = "refused"  # not good enough, or too little to learn from
    FAILED = "failed"  # crashed the trainer too often


class RewardModel(Entity, LeaseMixin, Base):
    """A head fitted on the feedback about a policy's replies."""

    __tablename__ = "reward_models"

    policy_id: Mapped[str] = mapped_column(ForeignKey("policies.id"))
    number: Mapped[int]
    state: Mapped[str] = mapped_column(String(16), default=RewardModelState.OPEN)
    actor: Mapped[str] = mapped_column(String(128), doc="who set its state: a worker, or an API key's prefix")
    reason: Mapped[str | None] = mapped_column(doc="why it has this state")
    serve_when_fitted: Mapped[bool] = mapped_column(default=True, doc="it serves once fitted, if it is good enough")
    path: Mapped[str | None]
    manifest_sha256: Mapped[str | None] = mapped_column(String(64))
    metrics: Mapped[dict[str, float]] = mapped_column(default=dict, doc="on feedback that was held out")
    num_pairs: Mapped[int | None]
    num_thumbs: Mapped[int | None]
    num_raters: Mapped[int | None]
    last_feedback_seq: Mapped[int] = mapped_column(BigInt, default=0, doc="the last feedback when its data was read")
    data_read_at: Mapped[float | None] = mapped_column(doc="when its data was read")
    settled_at: Mapped[float | None] = mapped_column(doc="when its fit ended, with or without success")
    served_at: Mapped[float | None] = mapped_column(doc="since when it serves, or last served")
    tainted_at: Mapped[float | None] = mapped_column(doc="since when some of its data is erased")

    __table_args__ = (
        UniqueConstraint("policy_id", "number"),
        partial_index("ix_reward_models_open", "policy_id", where="state = 'open'", unique=True),
        partial_index("ix_reward_models_serving", "policy_id", where="state = 'serving'", unique=True),
    )


class RewardModelTurn(Base):
    """A turn whose feedback the model was fitted on. Lineage and erasure find the model by it."""

    __tablename__ = "reward_model_turns"

    reward_model_id: Mapped[str] = mapped_column(ForeignKey("reward_models.id", ondelete="CASCADE"), primary_key=True)
    turn_id: Mapped[str] = mapped_column(ForeignKey("turns.id"), primary_key=True, index=True)
