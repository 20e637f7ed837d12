"""RewardModel: a head fitted on the feedback about a policy's replies, and the turns that it was fitted on."""

from enum import StrEnum
from typing import Any

from sqlalchemy import Boolean, Float, ForeignKey, Index, Integer, String, Text, UniqueConstraint, text
from sqlalchemy.orm import Mapped, mapped_column

from app.core.leases import LeaseMixin
from app.models.base import Base, Created, Json


class RewardModelState(StrEnum):
    OPEN = "open"  # to be fitted; claimed while its lease is in force
    TRAINED = "trained"  # good enough, but not requested to serve
    SERVING = "serving"  # its rewards count; at most one per policy
    DISABLED = "disabled"  # people disagreed with it, its files are damaged, or an operator disabled it
    RETIRED = "retired"  # a later one serves
    REFUSED = "refused"  # not good enough, or too little to learn from
    FAILED = "failed"  # crashed the trainer too often


class RewardModel(Created, LeaseMixin, Base):
    __tablename__ = "reward_models"

    id: Mapped[str] = mapped_column(String(48), primary_key=True)
    policy_id: Mapped[str] = mapped_column(ForeignKey("policies.id"))
    number: Mapped[int] = mapped_column(Integer)
    state: Mapped[str] = mapped_column(String(16), default=RewardModelState.OPEN)
    actor: Mapped[str] = mapped_column(String(128), doc="who set its state: a worker, or an API key's prefix")
    reason: Mapped[str | None] = mapped_column(Text, doc="why it has this state")
    serve_when_fitted: Mapped[bool] = mapped_column(
        Boolean, default=True, doc="it serves once it is fitted, if it is good enough"
    )
    path: Mapped[str | None] = mapped_column(Text)
    manifest_sha256: Mapped[str | None] = mapped_column(String(64))
    metrics: Mapped[dict[str, Any]] = mapped_column(Json, default=dict, doc="on feedback that was held out")
    num_pairs: Mapped[int | None] = mapped_column(Integer)
    num_thumbs: Mapped[int | None] = mapped_column(Integer)
    num_raters: Mapped[int | None] = mapped_column(Integer)
    last_feedback_seq: Mapped[int] = mapped_column(Integer, default=0, doc="the last feedback when its data was read")
    data_read_at: Mapped[float | None] = mapped_column(Float, doc="when its data was read")
    settled_at: Mapped[float | None] = mapped_column(Float, doc="when its fit ended, with or without success")
    served_at: Mapped[float | None] = mapped_column(Float, doc="since when it serves, or last served")
    tainted_at: Mapped[float | None] = mapped_column(Float, doc="since when some of its data is erased")

    __table_args__ = (
        UniqueConstraint("policy_id", "number"),
        Index(
            "ix_reward_models_open",
            "policy_id",
            unique=True,
            postgresql_where=text("state = 'open'"),
            sqlite_where=text("state = 'open'"),
        ),
        Index(
            "ix_reward_models_serving",
            "policy_id",
            unique=True,
            postgresql_where=text("state = 'serving'"),
            sqlite_where=text("state = 'serving'"),
        ),
    )


class RewardModelTurn(Base):
    """A turn whose feedback the model was fitted on. Lineage and erasure find the model by it."""

    __tablename__ = "reward_model_turns"

    reward_model_id: Mapped[str] = mapped_column(ForeignKey("reward_models.id", ondelete="CASCADE"), primary_key=True)
    turn_id: Mapped[str] = mapped_column(ForeignKey("turns.id"), primary_key=True, index=True)
