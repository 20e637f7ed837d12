"""Planned runs: the attempts at tasks of an environment that processes outside of the service play together.

Neither table holds what people wrote: a task is a number here, and its name is that of its episode.
"""

from enum import StrEnum

from sqlalchemy import ForeignKey, String, UniqueConstraint
from sqlalchemy.orm import Mapped, mapped_column

from app.core.leases import LeaseMixin
from app.models.base import Base, Entity, partial_index


class PlannedRun(Entity, Base):
    """A run: so many tasks, each so many times. Who claims an attempt locks its row, so that none is added twice."""

    __tablename__ = "planned_runs"

    project_id: Mapped[str] = mapped_column(ForeignKey("projects.id"))
    policy_id: Mapped[str] = mapped_column(ForeignKey("policies.id"))
    name: Mapped[str] = mapped_column(String(63))
    plan: Mapped[dict[str, object]] = mapped_column(doc="an app.environments.schemas.Plan")
    num_tasks: Mapped[int] = mapped_column(doc="it may grow; less where the environment has fewer")
    num_added: Mapped[int] = mapped_column(default=0, doc="the first so many tasks have rows of RunAttempt")
    cancelled_at: Mapped[float | None] = mapped_column(doc="since then no attempt begins; rows of open ones stay open")

    __table_args__ = (UniqueConstraint("project_id", "name"),)


class AttemptState(StrEnum):
    OPEN = "open"  # to be played; under way while its lease is in force
    DONE = "done"
    LOST = "lost"  # every try was lost
    CANCELLED = "cancelled"


class AttemptReason(StrEnum):
    """Why an attempt is lost or cancelled."""

    FAILED_TRIES = "failed_tries"  # the environment, or what it runs on, failed
    DEAD_PROCESSES = "dead_processes"  # the processes that played it died
    STALE_GROUP = "stale_group"  # its group began at a version that is too old to be learned from
    NO_TASK = "no_task"  # the environment has no such task any more
    RUN_CANCELLED = "run_cancelled"  # in views alone


class RunAttempt(Entity, LeaseMixin, Base):
    """One planned attempt: the n-th at a task. `attempt`, of its lease, counts how often it was claimed."""

    __tablename__ = "run_attempts"

    run_id: Mapped[str] = mapped_column(ForeignKey("planned_runs.id"))
    task_index: Mapped[int] = mapped_column(doc="of the task, in the order of the environment, from 0")
    attempt_index: Mapped[int] = mapped_column(doc="among the attempts at the task, from 0")
    state: Mapped[str] = mapped_column(String(16), default=AttemptState.OPEN)
    reason: Mapped[str | None] = mapped_column(String(16), doc="an AttemptReason")
    episode_id: Mapped[str | None] = mapped_column(String(48), doc="of the latest try; null before it begins")
    task_sha256: Mapped[str | None] = mapped_column(String(64), doc="of the task's name: the same in every process")
    num_failed: Mapped[int] = mapped_column(default=0, doc="tries that were reported as lost")
    num_expired: Mapped[int] = mapped_column(default=0, doc="tries whose lease ran out")

    __table_args__ = (
        UniqueConstraint("run_id", "task_index", "attempt_index"),
        partial_index("ix_run_attempts_open", "run_id", "task_index", "attempt_index", where="state = 'open'"),
    )
