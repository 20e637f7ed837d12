"""Rollouts: replies sampled for training, which no user sees. Datasets hold the prompts, plans pass over them."""

from enum import StrEnum
from typing import NotRequired, TypedDict

from sqlalchemy import BigInteger, ForeignKey, Index, String, UniqueConstraint, false, text
from sqlalchemy.orm import Mapped, mapped_column

from app.core.leases import LeaseMixin
from app.models.base import Base, Created, Entity, Json, partial_index


class DatasetKind(StrEnum):
    PROMPTS = "prompts"
    PREFERENCES = "preferences"


class Dataset(Entity, Base):
    """Imported prompts or preferences to learn from."""

    __tablename__ = "datasets"

    project_id: Mapped[str] = mapped_column(ForeignKey("projects.id"))
    name: Mapped[str] = mapped_column(String(63))
    kind: Mapped[str] = mapped_column(String(16))
    num_rows: Mapped[int]
    num_bytes: Mapped[int | None] = mapped_column(
        BigInteger, doc="of the imported file; null if an older release did it"
    )
    sha256: Mapped[str] = mapped_column(String(64), doc="of the imported file: the same file is imported once")
    importing_until: Mapped[float | None] = mapped_column(
        doc="while its rows are stored, when the import counts as dead; until then it has no name, and nobody sees it"
    )

    __table_args__ = (UniqueConstraint("project_id", "name"),)


class DatasetContent(TypedDict):
    """A row's prompt, and what it has beside it: `details` are a prompt's other columns."""

    messages: list[dict[str, object]]
    reference: NotRequired[str]
    details: NotRequired[dict[str, object]]
    chosen: NotRequired[list[dict[str, object]]]
    rejected: NotRequired[list[dict[str, object]]]


class DatasetRow(Base):
    """One row of prompts or of preferences."""

    __tablename__ = "dataset_rows"

    dataset_id: Mapped[str] = mapped_column(ForeignKey("datasets.id", ondelete="CASCADE"), primary_key=True)
    row_number: Mapped[int] = mapped_column(primary_key=True)
    content: Mapped[DatasetContent] = mapped_column(Json)


class RolloutState(StrEnum):
    OPEN = "open"  # to be sampled; claimed while its lease is in force
    DONE = "done"
    SKIPPED = "skipped"  # no longer needed, or no budget left
    FAILED = "failed"  # every attempt failed


class Rollout(Created, LeaseMixin, Base):
    """One reply to be sampled off the hot path. Its id is that of its turn, which exists before it is sampled."""

    __tablename__ = "rollouts"

    id: Mapped[str] = mapped_column(ForeignKey("turns.id"), primary_key=True)
    policy_id: Mapped[str] = mapped_column(ForeignKey("policies.id"))
    origin: Mapped[str] = mapped_column(String(16), doc="the origin of its turn")
    plan_id: Mapped[str | None] = mapped_column(ForeignKey("rollout_plans.id"), doc="set for prompt sets only")
    pass_number: Mapped[int | None] = mapped_column(doc="the pass of the plan, from 0")
    row_number: Mapped[int | None] = mapped_column(doc="the row of the dataset")
    choice_index: Mapped[int]
    state: Mapped[str] = mapped_column(String(16), default=RolloutState.OPEN)
    engine: Mapped[str | None] = mapped_column(String(63), doc="used last")
    due_at: Mapped[float] = mapped_column(doc="it is not sampled before")
    expires_at: Mapped[float] = mapped_column(
        doc="until then the other replies to its prompt wait for it; then it is skipped"
    )
    tokens: Mapped[int] = mapped_column(
        default=0, server_default=text("0"), doc="the budget while it is sampled, the tokens used afterwards"
    )
    duration_seconds: Mapped[float | None] = mapped_column(doc="from the request to the end of the reply")
    reward: Mapped[float | None] = mapped_column(doc="of the verifier, in [-1, 1]")
    reason: Mapped[str | None] = mapped_column(doc="why it was skipped or failed, or has no reward")
    settled_at: Mapped[float | None]
    counted: Mapped[bool] = mapped_column(default=False, server_default=false(), doc="it is part of a RolloutTotal")

    __table_args__ = (
        UniqueConstraint("plan_id", "pass_number", "row_number", "choice_index"),
        Index(
            "ix_rollouts_uncounted",
            "policy_id",
            postgresql_where=text("NOT counted"),
            sqlite_where=text("counted = 0"),
        ),
        partial_index("ix_rollouts_due_at", "due_at", where="state = 'open'"),
        Index("ix_rollouts_policy_id_created_at", "policy_id", "created_at"),
        Index("ix_rollouts_policy_id_origin_settled_at", "policy_id", "origin", "settled_at"),
    )


class PlanState(StrEnum):
    RUNNING = "running"
    PAUSED = "paused"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


class RolloutPlan(Entity, Base):
    """Passes over a dataset of prompts, with `n` replies to each. A worker that advances it locks its row, so that no
    prompt is sampled twice in a pass."""

    __tablename__ = "rollout_plans"

    project_id: Mapped[str] = mapped_column(ForeignKey("projects.id"))
    policy_id: Mapped[str] = mapped_column(ForeignKey("policies.id"))
    dataset_id: Mapped[str] = mapped_column(String(48), doc="if the dataset is deleted, the plan fails")
    dataset: Mapped[str] = mapped_column(String(63), doc="its name")
    state: Mapped[str] = mapped_column(String(16), default=PlanState.RUNNING)
    reason: Mapped[str | None] = mapped_column(doc="why it failed, was paused or cancelled")
    n: Mapped[int] = mapped_column(doc="replies to each prompt")
    passes: Mapped[int]
    verifier: Mapped[dict[str, object]] = mapped_column(doc="an alignment.signals.verifiers.VerifierConfig")
    temperature: Mapped[float]
    max_tokens: Mapped[int]
    prompts_per_version: Mapped[int | None] = mapped_column(doc="null: as many as a batch needs")
    num_prompts: Mapped[int] = mapped_column(doc="in the dataset")
    pass_number: Mapped[int] = mapped_column(default=0)
    position: Mapped[int] = mapped_column(default=0, doc="the next prompt of this pass")
    version_id: Mapped[str | None] = mapped_column(String(48), doc="used last")
    version_prompts: Mapped[int] = mapped_column(default=0, doc="prompts sampled from that version")
    settled_at: Mapped[float | None]

    __table_args__ = (Index("ix_rollout_plans_policy_id_created_at", "policy_id", "created_at"),)
