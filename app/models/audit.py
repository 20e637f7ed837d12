"""Audit: who changed what, when and why; each project's entries form a hash chain."""

import hashlib
import json
from enum import StrEnum

from sqlalchemy import Index, String
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Mapped, mapped_column

from app.models.base import Base, BigInt, Created, partial_index

TRAINER = "trainer"  # the actor of what the trainer does


class AuditAction(StrEnum):
    """What was done, as `object.past_participle`. Where a row's state changes, the second part is the new state."""

    AUDIT_EXPIRED = "audit.expired"  # the oldest entries were deleted; names the entry that the chain now starts after
    BATCH_ATTEMPT_FAILED = "batch.attempt_failed"  # the batch keeps its lease and is tried again
    BATCH_FAILED = "batch.failed"
    BATCH_QUARANTINED = "batch.quarantined"
    BATCH_REFUSED = "batch.refused"
    CANARY_BEGAN = "canary.began"
    CANARY_ENDED = "canary.ended"
    COMPLETION_DELETED = "completion.deleted"
    CONSOLE_LINK_CREATED = "console.link_created"  # signs in to the console once
    CONSOLE_SIGNED_IN = "console.signed_in"
    CONSOLE_SIGNED_OUT = "console.signed_out"
    DATASET_DELETED = "dataset.deleted"
    DATASET_IMPORTED = "dataset.imported"
    DELIVERY_UPDATED = "delivery.updated"
    DEPLOYMENT_DEPLOYED = "deployment.deployed"
    DEPLOYMENT_ROLLED_BACK = "deployment.rolled_back"
    EPISODE_DELETED = "episode.deleted"  # with the content of all its chats
    FEEDBACK_DENSE = "feedback.dense"  # most replies of the policy are rated by people, or enough of them
    FEEDBACK_SKIPPED = "feedback.skipped"  # curate could not process it
    FEEDBACK_SPARSE = "feedback.sparse"  # few are, and a reward model scores the others
    FEEDBACK_WITHDRAWN = "feedback.withdrawn"
    KEY_CREATED = "key.created"
    KEY_REVOKED = "key.revoked"
    PIN_REMOVED = "pin.removed"
    PIN_SET = "pin.set"
    POLICY_ACTIVE = "policy.active"  # it was resumed, or is no longer archived
    POLICY_ARCHIVED = "policy.archived"
    POLICY_CREATED = "policy.created"
    POLICY_DELETED = "policy.deleted"
    POLICY_PAUSED = "policy.paused"
    POLICY_UPDATED = "policy.updated"  # its own settings
    PREFERENCES_EXPORTED = "preferences.exported"
    PROJECT_CONSENT_CHANGED = "project.consent_changed"
    PROJECT_CREATED = "project.created"
    PROJECT_LIMITS_CHANGED = "project.limits_changed"
    RATER_BLOCKED = "rater.blocked"
    RATER_NORMAL = "rater.normal"
    RATER_QUARANTINED = "rater.quarantined"
    RATER_TRUSTED = "rater.trusted"
    RETENTION_APPLIED = "retention.applied"  # expired data was removed
    RETENTION_UPDATED = "retention.updated"
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
    SUBJECT_EXPORTED = "subject.exported"
    TOKEN_CREATED = "token.created"  # for browsers: how many a key has created in a minute
    TOKEN_SECRET_ROTATED = "token_secret.rotated"
    TRAINING_ASYNCHRONOUS = "training.asynchronous"
    TRAINING_HALTED = "training.halted"
    TRAINING_SYNCHRONOUS = "training.synchronous"
    TRAINING_TRIGGERED = "training.triggered"  # two ready samples are enough for the next batch
    TURNS_EXPORTED = "turns.exported"
    VERSION_LOAD_RETRIED = "version.load_retried"  # on engines that it has ended
    VERSION_PRUNED = "version.pruned"  # its files were deleted
    VERSION_REJECTED = "version.rejected"
    WEBHOOK_CREATED = "webhook.created"
    WEBHOOK_DELETED = "webhook.deleted"
    WEBHOOK_DISABLED = "webhook.disabled"  # by an admin, or because it failed for days
    WEBHOOK_REDELIVERED = "webhook.redelivered"
    WEBHOOK_SECRET_ROTATED = "webhook.secret_rotated"
    WEBHOOK_UPDATED = "webhook.updated"


# Entries that are not for each reply: those that applications add are many, and say nothing to an operator.
IS_EVENT = f"action NOT IN ('{AuditAction.TOKEN_CREATED}', '{AuditAction.FEEDBACK_WITHDRAWN}')"
RATER_ACTIONS = tuple(action for action in AuditAction if action.startswith("rater."))
ERASABLE_ACTIONS = (AuditAction.PIN_SET, *RATER_ACTIONS)  # their entries may name a data subject


class Audit(Created, Base):
    """An entry. The database refuses every change, except its sealing and the erasure of its content.

    Sealing gives the committed entry its place in the project's chain (`app.ops.audit_chain`).
    """

    __tablename__ = "audit"

    seq: Mapped[int] = mapped_column(BigInt, primary_key=True, autoincrement=True)
    project_id: Mapped[str] = mapped_column(String(48), index=True)
    actor: Mapped[str] = mapped_column(String(128), doc="an API key's prefix, or the worker that acted")
    action: Mapped[str] = mapped_column(String(64), doc="an AuditAction")
    subject: Mapped[str] = mapped_column(String(128), doc="the id or the name of what was changed")
    reason: Mapped[str | None]
    details: Mapped[dict[str, object]] = mapped_column(default=dict)
    chain_number: Mapped[int | None] = mapped_column(
        BigInt, doc="place in the project's chain from 1; null until sealed"
    )
    chain_hash: Mapped[str | None] = mapped_column(
        String(64), doc="SHA-256 over the previous entry's hash and this one"
    )
    erased_sha256: Mapped[str | None] = mapped_column(
        String(64), doc="of the content that was erased after the sealing"
    )

    __table_args__ = (
        Index("ix_audit_project_id_action_subject", "project_id", "action", "subject"),
        Index("ix_audit_project_id_seq", "project_id", "seq"),
        partial_index("ix_audit_events", "project_id", "seq", where=IS_EVENT),
        partial_index("ix_audit_unsealed", "project_id", "seq", where="chain_hash IS NULL"),
        partial_index(
            "uq_audit_project_id_chain_number",
            *("project_id", "chain_number"),
            where="chain_number IS NOT NULL",
            unique=True,
        ),
    )

    def erase(self, subject: str) -> None:
        """Replace the subject, and remove reason and details. The chain stays intact: the hash of the content stays."""
        if self.chain_hash is not None and self.erased_sha256 is None:
            self.erased_sha256 = self._content_sha256()
        self.subject, self.reason, self.details = subject, None, {}

    @property
    def is_erasure_valid(self) -> bool:
        """Whether the entry is not erased, or is one that an erasure may empty, and is empty."""
        is_empty = self.reason is None and self.details == {}
        return self.erased_sha256 is None or (is_empty and self.action in ERASABLE_ACTIONS)

    def compute_chain_hash(self, previous: str) -> str:
        """Return the hash of this entry at its `chain_number`, after the entry whose hash is `previous`."""
        content = self.erased_sha256 or self._content_sha256()
        place = (self.project_id, self.chain_number, self.seq)
        return _hash_json(previous, *place, self.created_at, self.actor, self.action, content)

    def _content_sha256(self) -> str:
        return _hash_json(self.subject, self.reason, self.details)


class AuditChain(Base):
    """The last entry of a project's chain. Sealing locks this row, so that a chain has one writer at a time."""

    __tablename__ = "audit_chains"

    project_id: Mapped[str] = mapped_column(String(48), primary_key=True)
    number: Mapped[int] = mapped_column(BigInt, default=0)
    hash: Mapped[str] = mapped_column(String(64), default="", doc="empty before the first entry")
    start_number: Mapped[int] = mapped_column(
        BigInt,
        default=0,
        server_default="0",
        doc="the last entry that was deleted because it had expired; 0 if none was",
    )
    start_hash: Mapped[str] = mapped_column(String(64), default="", server_default="", doc="the hash of that entry")


def _hash_json(*values: object) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def record_audit(
    session: AsyncSession,
    actor: str,
    action: AuditAction,
    subject: str,
    reason: str | None = None,
    *,
    project_id: str,
    **details: object,
) -> None:
    """Add an audit entry to the caller's transaction."""
    session.add(
        Audit(actor=actor, action=action, subject=subject, reason=reason, project_id=project_id, details=details)
    )
