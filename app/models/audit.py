"""Audit: who changed what, when and why."""

from enum import StrEnum
from typing import Any

from sqlalchemy import Index, String
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Mapped, mapped_column

from app.models.base import Base, Created


class AuditAction(StrEnum):
    """What was done, as `object.past_participle`. Where a row's state changes, the second part is the new state."""

    BATCH_ATTEMPT_FAILED = "batch.attempt_failed"  # the batch keeps its lease and is tried again
    BATCH_FAILED = "batch.failed"
    BATCH_QUARANTINED = "batch.quarantined"
    BATCH_REFUSED = "batch.refused"
    CANARY_BEGAN = "canary.began"
    CANARY_ENDED = "canary.ended"
    DELIVERY_UPDATED = "delivery.updated"
    DEPLOYMENT_DEPLOYED = "deployment.deployed"
    DEPLOYMENT_ROLLED_BACK = "deployment.rolled_back"
    FEEDBACK_DENSE = "feedback.dense"  # most replies of the policy are rated by people, or enough of them
    FEEDBACK_SKIPPED = "feedback.skipped"  # curate could not process it
    FEEDBACK_SPARSE = "feedback.sparse"  # few are, and a reward model scores the others
    KEY_CREATED = "key.created"
    KEY_REVOKED = "key.revoked"
    PIN_REMOVED = "pin.removed"
    PIN_SET = "pin.set"
    PROJECT_CONSENT_CHANGED = "project.consent_changed"
    PROJECT_CREATED = "project.created"
    RATER_BLOCKED = "rater.blocked"
    RATER_NORMAL = "rater.normal"
    RATER_QUARANTINED = "rater.quarantined"
    RATER_TRUSTED = "rater.trusted"
    REWARD_MODEL_ATTEMPT_FAILED = "reward_model.attempt_failed"
    REWARD_MODEL_DISABLED = "reward_model.disabled"
    REWARD_MODEL_FAILED = "reward_model.failed"
    REWARD_MODEL_FIT_REQUESTED = "reward_model.fit_requested"
    REWARD_MODEL_REFUSED = "reward_model.refused"
    REWARD_MODEL_SERVING = "reward_model.serving"
    REWARD_MODEL_TRAINED = "reward_model.trained"
    REWARDS_RESET = "rewards.reset"
    REWARDS_UPDATED = "rewards.updated"
    ROLLOUT_PLAN_CANCELLED = "rollout_plan.cancelled"
    ROLLOUT_PLAN_CREATED = "rollout_plan.created"
    ROLLOUT_PLAN_DONE = "rollout_plan.done"
    ROLLOUT_PLAN_FAILED = "rollout_plan.failed"
    ROLLOUT_PLAN_PAUSED = "rollout_plan.paused"
    ROLLOUT_PLAN_RUNNING = "rollout_plan.running"
    ROLLOUTS_RESET = "rollouts.reset"
    ROLLOUTS_UPDATED = "rollouts.updated"
    SHADOW_BEGAN = "shadow.began"
    SHADOW_PASSED = "shadow.passed"
    SUBJECT_ERASED = "subject.erased"
    TRAINING_ASYNCHRONOUS = "training.asynchronous"
    TRAINING_HALTED = "training.halted"
    TRAINING_SYNCHRONOUS = "training.synchronous"
    TRAINING_TRIGGERED = "training.triggered"  # two ready samples are enough for the next batch
    VERSION_REJECTED = "version.rejected"


class Audit(Created, Base):
    __tablename__ = "audit"

    seq: Mapped[int] = mapped_column(primary_key=True, autoincrement=True)
    project_id: Mapped[str | None] = mapped_column(
        String(48), index=True, doc="the owner of the entry, if there is one"
    )
    actor: Mapped[str] = mapped_column(String(128), doc="an API key's prefix, or the worker that acted")
    action: Mapped[str] = mapped_column(String(64), doc="an AuditAction")
    subject: Mapped[str] = mapped_column(String(128), doc="the id or the name of what was changed")
    reason: Mapped[str | None]
    details: Mapped[dict[str, Any]] = mapped_column(default=dict)

    __table_args__ = (Index("ix_audit_project_id_action_subject", "project_id", "action", "subject"),)


def record_audit(
    session: AsyncSession,
    actor: str,
    action: AuditAction,
    subject: str,
    reason: str | None = None,
    *,
    project_id: str,
    **details: Any,
) -> None:
    """Add an audit entry to the caller's transaction."""
    session.add(
        Audit(actor=actor, action=action, subject=subject, reason=reason, project_id=project_id, details=details)
    )
