"""The state of a policy's learning: the samples that wait, what the next batch waits for, its caps and its trigger."""

import math
from typing import NamedTuple

from sqlalchemy import ColumnElement, Select, and_, case, func, select, true
from sqlalchemy.ext.asyncio import AsyncSession

from alignment.tolerance import is_tie
from app.core.database import database_time, now
from app.core.errors import Conflict, require_row
from app.core.jobs import enqueue_after_commit
from app.core.pagination import apply_keyset
from app.core.settings import Settings
from app.models import (
    ONCE_LIVE,
    Audit,
    AuditAction,
    Batch,
    BatchState,
    LearningMode,
    Policy,
    PolicyState,
    Sample,
    SampleState,
    VersionState,
)
from app.policies import repository
from app.policies.locks import LockedPolicy
from app.policies.overrides import effective_settings
from app.policies.references import version_name
from app.policies.service import audit_policy
from app.training import line_moves, sample_conditions
from app.training.policy_config import effective_rollouts
from app.training.sample_columns import consenting_samples, is_open
from app.training.sample_totals import count_waiting

MIN_TRIGGERED_SAMPLES = 2
MIN_RATERS_FOR_EVEN_SHARE = 5
MAX_COUNTED = 10_000  # samples that wait, the first ones: no page reads all of a backlog


class SampleCounts(NamedTuple):
    """The samples that training may still use.

    `ready` samples may go into the next batch, `not_ready` ones wait for late feedback, and `quarantined` ones for an
    admin. `raters` are the distinct raters of the ready samples; a sample without a rater counts as one. Of the ready
    ones the algorithm can use `usable`, and `waiting_for_new` of these join a batch only together with as many others
    (`waits_for_new`); `comparable` are in groups with different rewards. `corrected` ones have corrected texts,
    which need no contrast.

    At most MAX_COUNTED are counted, but for the quarantined ones. If there are more ready samples (`is_limited`), all
    that is said of them is about the first ones, up to `counted_until` (of their `ready_at`), with those of that time.
    """

    ready: int
    not_ready: int
    quarantined: int
    raters: int
    oldest_ready_at: float | None
    lowest_reward: float | None
    highest_reward: float | None
    usable: int
    waiting_for_new: int
    comparable: int
    corrected: int
    now: float
    counted_until: float
    is_limited: bool


async def count_samples(session: AsyncSession, policy: Policy, settings: Settings) -> SampleCounts:
    settings = effective_settings(policy, settings)
    is_allowed = await sample_conditions.allowed_samples(session, policy, settings)
    is_own_open = and_(Sample.policy_id == policy.id, is_open())
    time = await database_time(session)
    last = await _find_last_counted(session, and_(is_own_open, is_allowed), time)
    until = time if last is None else last
    usable = sample_conditions.is_learnable(policy, is_allowed, settings, until)
    has_contrast = (
        Sample.is_corrected
        | sample_conditions.is_in_group(
            policy.id, is_allowed, sample_conditions.rewards_differ(settings.algorithm.min_contrast), until
        )
        if settings.algorithm.needs_groups
        else true()
    )
    waiting = await count_waiting(session, [policy.id])
    query = select(
        func.count(),
        _count_first(select(Sample.turn_id).where(is_own_open, Sample.ready_at > time, is_allowed)),
        func.count(func.coalesce(Sample.rater, Sample.turn_id).distinct()),
        func.min(Sample.ready_at),
        func.min(Sample.reward),
        func.max(Sample.reward),
        func.count(case((usable, 1))),
        func.count(case((usable & sample_conditions.waits_for_new(), 1))),
        func.count(case((usable & has_contrast, 1))),
        func.count(case((usable & Sample.is_corrected, 1))),
    ).where(is_own_open, is_allowed, Sample.ready_at <= until)
    ready, not_ready, *figures = (await session.execute(query)).one()
    quarantined = waiting.get((policy.id, SampleState.QUARANTINED), 0)
    return SampleCounts._make((ready, not_ready, quarantined, *figures, time, until, last is not None))


async def _find_last_counted(
    session: AsyncSession, is_open_and_allowed: ColumnElement[bool], time: float
) -> float | None:
    """Return the `ready_at` of the last ready sample that is counted; None if there are no others after it."""
    ready_at = select(Sample.ready_at).where(is_open_and_allowed, Sample.ready_at <= time)
    ready_at = ready_at.order_by(Sample.ready_at, Sample.turn_id)
    last = list(await session.scalars(ready_at.offset(MAX_COUNTED - 1).limit(2)))
    return last[0] if len(last) == 2 else None


def _count_first(samples: Select[str]) -> ColumnElement[int]:
    """Return the number of the samples, at most MAX_COUNTED, as a SQL expression. They are read by an index."""
    first = samples.order_by(Sample.ready_at, Sample.turn_id).limit(MAX_COUNTED).subquery()
    return select(func.count()).select_from(first).scalar_subquery()


async def _count_without_consent(session: AsyncSession, policy: Policy) -> int:
    ready = (Sample.policy_id == policy.id, is_open(), Sample.ready_at <= now())
    is_consenting = await consenting_samples(session, policy.project_id)
    without = select(Sample.turn_id).where(*ready, ~is_consenting)
    return int(await session.scalar(select(_count_first(without))) or 0)


class Wait(NamedTuple):
    """What the next batch waits for: a sentence, and the setting that decides it, if one does."""

    sentence: str
    setting: str | None = None


async def explain_wait(
    session: AsyncSession, policy: Policy, counts: SampleCounts, settings: Settings, *, triggered: bool
) -> Wait:
    """Return what the next batch waits for. `triggered`: an operator has requested a batch."""
    settings = effective_settings(policy, settings)
    if policy.state != PolicyState.ACTIVE:
        return Wait(f"The policy is {policy.state}{_undo(policy)}.")
    if policy.mode == LearningMode.HALTED:
        return Wait("Learning is halted until an operator resumes it.")
    if await line_moves.is_moving(session, policy.id):
        return Wait("The samples of versions that were undone, or are live again, are being moved.")
    open_batch = select(Batch.id).where(Batch.policy_id == policy.id, Batch.state == BatchState.OPEN).limit(1)
    if (open_batch_id := await session.scalar(open_batch)) is not None:
        return Wait(f"An update is running: {open_batch_id}.")
    head = await repository.get_version(session, policy.head_version_id or "")
    if head.state == VersionState.CANARY:
        sentence = f"{version_name(policy, head)} is a canary: learning continues when it is live or rolled back."
        return Wait(sentence, "release.canary")
    if head.state == VersionState.SHADOW:
        sentence = f"{version_name(policy, head)} is in shadow: learning continues when it is live or rejected."
        return Wait(sentence, "release.shadow")
    if head.state not in ONCE_LIVE:
        return Wait(f"{version_name(policy, head)} is not published yet.")
    wait = await _explain_samples(session, policy, counts, settings, triggered=triggered)
    if counts.is_limited:
        return wait._replace(sentence=f"{wait.sentence} This is about the first {MAX_COUNTED:,} of the ready samples.")
    return wait


async def _explain_samples(
    session: AsyncSession, policy: Policy, counts: SampleCounts, settings: Settings, *, triggered: bool
) -> Wait:
    """Return what the samples that are counted lack for a batch. `settings` are the policy's own."""
    min_size = MIN_TRIGGERED_SAMPLES if triggered else settings.trainer.smallest_batch
    algorithm = settings.algorithm.type.replace("_", " ").upper()
    if counts.ready and not counts.usable:
        return Wait(
            f"{counts.ready} samples wait: {algorithm} compares replies to one prompt, and none of them has another "
            f"reply. {_advise_groups(policy, settings)} or choose KTO (ATTUNE_ALGORITHM).",
            "rollouts.group_sampling",
        )
    if counts.ready < min_size:
        num_withheld = await _count_without_consent(session, policy)
        withheld = f" {num_withheld} others wait because their project or API key does not consent to training."
        sentence = f"{min_size - counts.ready} more ready samples.{withheld if num_withheld else ''}"
        return Wait(sentence, "trainer.min_batch_size")
    if counts.usable < min_size:
        return Wait(
            f"{min_size - counts.usable} more ready samples that {algorithm} can compare: {counts.usable} of the "
            f"{counts.ready} ready samples have another reply to their prompt.",
            "rollouts.group_sampling",
        )
    if counts.raters < settings.raters.min_raters:
        return Wait(f"{settings.raters.min_raters - counts.raters} more raters.", "raters.min_raters")
    num_new = counts.usable - counts.waiting_for_new
    if 2 * num_new < min_size:
        return Wait(
            f"{math.ceil(min_size / 2) - num_new} more new ready samples: {counts.waiting_for_new} of the "
            f"{counts.usable} were in a batch without contrast, or in a version that was undone before anybody judged "
            "it, and are at most half of the next batch.",
        )
    size = min(counts.usable, settings.trainer.batch_size)
    selectable, limiting = await _count_selectable(session, policy, counts, settings)
    if selectable < min_size:
        return Wait(
            f"At least {min_size - selectable} more ready samples of other {limiting}s: of the {counts.usable} "
            f"ready samples at most {selectable} may be in one batch (raters.max_{limiting}_share).",
            f"raters.max_{limiting}_share",
        )
    size = min(size, selectable)
    waited = 0.0 if counts.oldest_ready_at is None else counts.now - counts.oldest_ready_at
    remaining = settings.trainer.max_wait_seconds - waited
    if size < settings.trainer.batch_size and not triggered and remaining > 0:
        of_others = f" of other {limiting}s" if size < counts.usable else ""
        missing = settings.trainer.batch_size - size
        sentence = f"{missing} more ready samples{of_others}; in {remaining:.0f} s fewer are enough."
        return Wait(sentence, "trainer.max_wait_seconds")
    if not counts.comparable:
        return Wait(
            f"No two of the {counts.usable} ready samples that answer one prompt have different rewards: {algorithm} "
            "has nothing to compare.",
            "rollouts.group_sampling",
        )
    extremes = [reward for reward in (counts.lowest_reward, counts.highest_reward) if reward is not None]
    if extremes and is_tie(extremes) and counts.corrected < min_size:
        or_corrections = f", or {min_size - counts.corrected} more corrections" if counts.corrected else ""
        return Wait(
            f"All {counts.ready} ready samples have the reward {extremes[0]:g}: the next batch needs one with "
            f"another reward{or_corrections}.",
        )
    return Wait(
        f"Nothing that is counted here: {size} ready samples are within each cap. All caps together may allow fewer, "
        "also in a smaller batch, where a rater has reduced trust (raters.trust), and where many samples come from a "
        "prompt set.",
    )


def _undo(policy: Policy) -> str:
    verb = {PolicyState.PAUSED: "resume", PolicyState.ARCHIVED: "unarchive"}.get(PolicyState(policy.state))
    return f": learning continues after POST /v1/policies/{policy.name}/{verb}" if verb else ""


def _advise_groups(policy: Policy, settings: Settings) -> str:
    if effective_rollouts(policy, settings).group_sampling.extra_replies:
        return "Group sampling is on: wait for new replies,"
    return "Turn on group sampling (ATTUNE_ROLLOUTS)"


def max_samples(share: float, size: int) -> int:
    """Return how many samples of a batch of `size` one rater, conversation or cluster may have; at least one."""
    return max(1, int(share * size))


def even_share(size: int, raters: int) -> int:
    """Return a batch's size divided by the number of raters, rounded up; 1 where there are too few raters."""
    return math.ceil(size / raters) if raters >= MIN_RATERS_FOR_EVEN_SHARE else 1


async def _count_selectable(
    session: AsyncSession, policy: Policy, counts: SampleCounts, settings: Settings
) -> tuple[int, str]:
    """Return an upper bound of the ready samples that fit into one batch, and the cap that sets it.

    The cap is "rater", "conversation", "cluster", or "" if none of them limits the batch. Each cap is applied by
    itself: all of them together, and raters of reduced trust, may leave fewer. Replies to one prompt count once, since
    they are selected together.
    """
    size = settings.trainer.batch_size
    caps = {
        "conversation": (Sample.conversation_id, max_samples(settings.raters.max_conversation_share, size)),
        "cluster": (Sample.cluster, max_samples(settings.raters.max_cluster_share, size)),
    }
    if settings.raters.max_rater_share < 1.0:
        limit = max(max_samples(settings.raters.max_rater_share, size), even_share(size, counts.raters))
        caps = {"rater": (Sample.rater, limit), **caps}
    is_allowed = await sample_conditions.allowed_samples(session, policy, settings)
    is_learnable = sample_conditions.is_learnable(policy, is_allowed, settings, counts.counted_until)
    is_usable = and_(is_allowed, Sample.ready_at <= counts.counted_until, is_learnable)
    fewest, limiting = size, ""
    for name, (owner, limit) in caps.items():
        ready = (
            select(
                owner.label("owner"),
                func.dense_rank()
                .over(partition_by=func.coalesce(owner, ""), order_by=sample_conditions.group_key())
                .label("rank"),
            )
            .where(Sample.policy_id == policy.id, is_open(), is_usable)
            .subquery()
        ).c
        # Not partitioned by the column itself, whose index SQLite would choose: it has all samples that wait.
        query = select(func.count()).where(ready.owner.is_(None) | (ready.rank <= limit))
        count = int(await session.scalar(query) or 0)
        if count < fewest:
            fewest, limiting = count, name
    return fewest, limiting


def trigger(locked: LockedPolicy, *, actor: str, reason: str | None) -> None:
    """Let the next batch have as few as two samples. Raises Conflict while learning is halted."""
    session, policy = locked
    if policy.state != PolicyState.ACTIVE:
        raise Conflict(f"'{policy.name}' is {policy.state}{_undo(policy)}.", code="policy_not_active")
    if policy.mode == LearningMode.HALTED:
        raise Conflict(f"Learning of '{policy.name}' is halted; resume it first.", code="learning_halted")
    audit_policy(session, policy, AuditAction.TRAINING_TRIGGERED, actor, reason)
    enqueue_after_commit(session, "curate", "assemble")


async def is_triggered(session: AsyncSession, policy: Policy) -> bool:
    """Whether the policy was triggered after its latest batch was frozen. The audit entry is the flag."""
    triggered = select(func.max(Audit.created_at)).where(
        Audit.project_id == policy.project_id,
        Audit.action == AuditAction.TRAINING_TRIGGERED,
        Audit.subject == policy.name,
    )
    frozen = select(func.max(Batch.created_at)).where(Batch.policy_id == policy.id)
    triggered_at, frozen_at = await session.scalar(triggered), await session.scalar(frozen)
    return (triggered_at or 0.0) > (frozen_at or 0.0)


async def list_batches(session: AsyncSession, policy: Policy, after: str | None, limit: int) -> list[Batch]:
    """Return up to `limit + 1` batches, the newest first. Raises NotFound."""
    query, last = select(Batch).where(Batch.policy_id == policy.id), None
    if after is not None:
        row = await session.scalar(query.where(Batch.id == after))
        last = require_row(row, f"There is no update '{after}'.", param="after")
    query = apply_keyset(query, (Batch.created_at, Batch.id), last, limit, descending=True)
    return list(await session.scalars(query))
