"""Sample and Batch: turns with their rewards, and the frozen sets of them that updates are trained on."""

from enum import StrEnum

from sqlalchemy import ForeignKey, Index, String, false, true
from sqlalchemy.orm import Mapped, mapped_column

from app.core.database import now
from app.core.leases import LeaseMixin
from app.models.base import Base, Created, Entity, partial_index

# Samples that SampleTotals count in another state than they have; see app/training/sample_totals.py. PostgreSQL expects
# few rows of a CASE that equals a constant, and so chooses the index; of two columns that differ it expects nearly all.
IS_MISCOUNTED = (
    "CASE WHEN counted_state <> state AND (state IN ('open', 'quarantined') OR counted_state <> '') "
    "THEN 1 ELSE 0 END = 1"
)
# Samples that returned from a batch and have changed since; see app/training/sample_failures.py.
IS_UNCOUNTED = "CASE WHEN num_returns > 0 AND failures_counted_at <> changed_at THEN 1 ELSE 0 END = 1"
HAS_FAILED = "num_failures > 0"
# Samples that have changed since they were compared with their groups; see workers/training/contrast.py.
IS_UNCOMPARED = "CASE WHEN compared_at <> changed_at THEN 1 ELSE 0 END = 1"
HAS_CONTRAST = "group_contrast > 0"
WITHDRAWN = "withdrawn"  # why a sample was dropped: its turn has no effective feedback left


class SampleState(StrEnum):
    OPEN = "open"
    QUARANTINED = "quarantined"  # suspicious: waits until an admin releases or drops it
    BATCHED = "batched"
    TRAINED = "trained"
    DROPPED = "dropped"


NEVER = -1.0  # a time before every `changed_at`
COUNTED_STATES = (SampleState.OPEN, SampleState.QUARANTINED)  # that SampleTotals count samples in


class SampleRule(StrEnum):
    """The rule by which a sample is not learned from. Its `reason` says the same as a sentence."""

    EXCLUDED = "excluded"  # its turn must not be trained on (Turn.exclusion_reason)
    WITHDRAWN = "withdrawn"  # no effective feedback is left
    ERASED = "erased"
    RATER_BLOCKED = "rater_blocked"  # an admin dropped the feedback of its rater
    TOO_OLD = "too_old"
    NOTHING_TO_COMPARE = "nothing_to_compare"  # the algorithm compares replies to one prompt, and there was no other
    OFF_PATH = "off_path"  # the attempts of a group are compared, and its episode did not go on from its reply
    ATTEMPT_LOST = "attempt_lost"  # its episode was abandoned and no person judged it, or its infrastructure failed
    UNTRAINABLE = "untrainable"  # every batch with it failed
    VERSION_REJECTED = "version_rejected"  # every version that learned from it was rejected
    ROLLED_BACK = "rolled_back"  # the version that learned from it was judged by people and rolled back


class Sample(Created, Base):
    """A turn with its reward. There is at most one per turn, in at most one batch at a time.

    A sample that was learned from with an automated reward is open again when a person gives feedback on its reply.

    A sample whose batch failed or whose version was undone returns to the open state, so that it can be learned from
    again. BatchTurn keeps every batch that it was in.
    """

    __tablename__ = "samples"

    turn_id: Mapped[str] = mapped_column(ForeignKey("turns.id"), primary_key=True)
    policy_id: Mapped[str] = mapped_column(ForeignKey("policies.id"))
    version_id: Mapped[str] = mapped_column(ForeignKey("versions.id"))
    reward: Mapped[float]
    turn_return: Mapped[float | None] = mapped_column(
        "step_return", doc="of a turn of a compared episode: its return, beside the reward of the whole episode"
    )
    turn_reward: Mapped[float | None] = mapped_column(
        "step_reward",
        doc="of a turn whose reward is its return: what it adds to it, with the outcome at the end of a line of turns",
    )
    weight: Mapped[float] = mapped_column(
        default=1.0, server_default="1", doc="confidence in the reward, above 0 and at most 1; multiplies the loss"
    )
    state: Mapped[str] = mapped_column(String(16), default=SampleState.OPEN)
    rule: Mapped[str | None] = mapped_column(String(32), doc="a SampleRule, if it was dropped")
    reason: Mapped[str | None] = mapped_column(doc="why it was dropped or quarantined, or why it returned")
    uses_feedback: Mapped[bool] = mapped_column(
        default=True, server_default=true(), doc="whether its reward includes the feedback on its turn"
    )
    is_corrected: Mapped[bool] = mapped_column(
        default=False,
        server_default=false(),
        doc="whether somebody has corrected its reply, and the text can be learned from",
    )
    num_returns: Mapped[int] = mapped_column(default=0, server_default="0", doc="how often it returned from a batch")
    num_failures: Mapped[int] = mapped_column(
        default=0,
        server_default="0",
        doc="in how many quarantined batches it was when they were counted; 0 if an update has succeeded with it",
    )
    failures_counted_at: Mapped[float] = mapped_column(
        default=NEVER, server_default="-1", doc="its `changed_at` when `num_failures` was counted"
    )
    batch_id: Mapped[str | None] = mapped_column(ForeignKey("batches.id"), index=True)
    automated_batch_id: Mapped[str | None] = mapped_column(
        String(48), doc="the batch that has learned from its automated reward, which a person's feedback replaces"
    )
    ready_at: Mapped[float] = mapped_column(
        default=now(), server_default="0", doc="it waits for late rewards until then"
    )
    conversation_id: Mapped[str | None] = mapped_column(String(255))
    rater: Mapped[str | None] = mapped_column(String(320), doc="the rater with the most weight; null if no person")
    cluster: Mapped[str | None] = mapped_column(String(32), doc="equal for near-duplicates")
    group_id: Mapped[str | None] = mapped_column(
        String(300),
        doc="equal for replies to one prompt, and else for what a batch has as a whole",
    )
    episode_id: Mapped[str | None] = mapped_column(
        String(48), doc="its turn's, where its group is one of episodes: the attempt that it counts as"
    )
    episode_reward: Mapped[float | None] = mapped_column(
        doc="of that attempt: what the attempts of the group are compared by, while `reward` may be a return"
    )
    group_contrast: Mapped[float] = mapped_column(
        default=0.0, server_default="0", doc="by how much the rewards of its group differed when it was compared"
    )
    compared_at: Mapped[float] = mapped_column(
        default=NEVER, server_default="-1", doc="its `changed_at` when it was compared with its group"
    )
    # Copies, so that the assembly reads no other table; see `app.training.sample_columns`.
    origin: Mapped[str | None] = mapped_column(String(16), doc="its turn's; null while the columns below are not known")
    key_id: Mapped[str | None] = mapped_column(String(48), doc="its turn's, whose consent counts")
    replied_at: Mapped[float] = mapped_column(default=0.0, server_default="0", doc="when its turn was created")
    is_automated: Mapped[bool] = mapped_column(
        default=False, server_default=false(), doc="whether its reward comes from neither feedback nor a verifier"
    )
    changed_at: Mapped[float] = mapped_column(
        default=now(), onupdate=now(), server_default="0", doc="when one of its columns was changed last"
    )
    counted_state: Mapped[str] = mapped_column(
        String(16), default="", server_default="", doc="the state in which a SampleTotal counts it; empty if none does"
    )

    __table_args__ = (
        Index("ix_samples_policy_id_state", "policy_id", "state"),
        Index("ix_samples_policy_id_created_at", "policy_id", "created_at"),
        partial_index("ix_samples_policy_id_ready_at", "policy_id", "ready_at", where="state = 'open'"),
        partial_index("ix_samples_automated_batch_id", "automated_batch_id", where="automated_batch_id IS NOT NULL"),
        partial_index("ix_samples_in_order", "policy_id", "is_automated", "ready_at", where="state = 'open'"),
        partial_index("ix_samples_in_groups", "policy_id", "group_id", where="state = 'open'"),
        partial_index("ix_samples_of_raters", "policy_id", "rater", where="state = 'open'"),
        partial_index(
            "ix_samples_of_versions", *("policy_id", "is_automated", "version_id", "turn_id"), where="state = 'open'"
        ),
        partial_index("ix_samples_policy_id_reward", "policy_id", "reward", where="state = 'open'"),
        partial_index("ix_samples_corrected", "policy_id", "is_corrected", where="state = 'open'"),
        partial_index("ix_samples_policy_id_replied_at", "policy_id", "replied_at", where="state = 'open'"),
        partial_index("ix_samples_policy_id_changed_at", "policy_id", "changed_at", where="state = 'open'"),
        partial_index("ix_samples_miscounted", "policy_id", "changed_at", where=IS_MISCOUNTED),
        partial_index("ix_samples_returned", "policy_id", where="state = 'open' AND num_returns > 0"),
        partial_index(
            "ix_samples_uncounted_failures", "policy_id", "turn_id", where=f"state = 'open' AND {IS_UNCOUNTED}"
        ),
        partial_index("ix_samples_failed", "policy_id", "num_failures", where=f"state = 'open' AND {HAS_FAILED}"),
        partial_index("ix_samples_uncompared", "policy_id", "turn_id", where=f"state = 'open' AND {IS_UNCOMPARED}"),
        partial_index(
            "ix_samples_contrast",
            *("policy_id", "group_contrast", "turn_id"),
            where=f"state = 'open' AND {HAS_CONTRAST}",
        ),
        partial_index(
            "ix_samples_rewards_of_groups",
            *("policy_id", "group_id", "episode_reward", "reward"),
            where="state = 'open'",
        ),
        partial_index("ix_samples_to_fill", "policy_id", "turn_id", where="state = 'open' AND origin IS NULL"),
        # Of statements of an earlier release, which name it.
        partial_index("ix_samples_unknown_origin", "policy_id", "origin", where="state = 'open' AND origin IS NULL"),
    )


class AssemblyLook(Base):
    """The last look at a policy's samples that found no batch, so that it is not repeated while nothing has changed."""

    __tablename__ = "assembly_looks"

    policy_id: Mapped[str] = mapped_column(ForeignKey("policies.id"), primary_key=True)
    looked_at: Mapped[float]
    next_at: Mapped[float] = mapped_column(doc="when the next look is due although nothing has changed")
    conditions: Mapped[str] = mapped_column(String(64), doc="hash of what the result depends on besides the samples")
    no_contrast_at: Mapped[float | None] = mapped_column(
        doc="null; when earlier releases have read all rewards, which did not differ"
    )


class BatchState(StrEnum):
    OPEN = "open"  # waits for the trainer; claimed while its lease is in force
    TRAINED = "trained"
    REFUSED = "refused"  # some of its samples were erased, or the algorithm had nothing to compare
    FAILED = "failed"  # the head moved, or the parent's directory is damaged
    QUARANTINED = "quarantined"  # the update was refused, or crashed the trainer too often


class Batch(Entity, LeaseMixin, Base):
    """A frozen set of samples for one update."""

    __tablename__ = "batches"

    policy_id: Mapped[str] = mapped_column(ForeignKey("policies.id"), index=True)
    parent_id: Mapped[str] = mapped_column(ForeignKey("versions.id"), doc="the version this update starts from")
    state: Mapped[str] = mapped_column(String(16), index=True, default=BatchState.OPEN)
    reason: Mapped[str | None]
    num_samples: Mapped[int]
    num_raters: Mapped[int | None] = mapped_column(doc="distinct raters of its samples; null when not counted")
    claimed_at: Mapped[float | None] = mapped_column(doc="when a trainer last claimed it")
    version_id: Mapped[str | None] = mapped_column(String(48), doc="the version that the update created")
    metrics: Mapped[dict[str, float]] = mapped_column(default=dict)
    settled_at: Mapped[float | None]

    __table_args__ = (Index("ix_batches_policy_id_created_at", "policy_id", "created_at"),)


class BatchTurn(Base):
    """A turn that a batch was frozen with. It stays when the sample returns, so lineage and erasure find every use.

    It goes if the sample leaves the batch before the update, or if the update did not use it.
    """

    __tablename__ = "batch_turns"

    batch_id: Mapped[str] = mapped_column(ForeignKey("batches.id"), primary_key=True)
    turn_id: Mapped[str] = mapped_column(ForeignKey("turns.id"), primary_key=True, index=True)
    automated: Mapped[bool] = mapped_column(
        default=False,
        server_default=false(),
        doc="whether its reward came from neither feedback nor a verifier: a person's later feedback replaces it",
    )
