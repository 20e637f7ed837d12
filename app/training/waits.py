"""What the next batch of a policy waits for."""

import math
from typing import NamedTuple

from sqlalchemy import and_, exists, func, select
from sqlalchemy.ext.asyncio import AsyncSession

from alignment.tolerance import is_tie
from app.core.database import now
from app.core.settings import Settings
from app.models import ONCE_LIVE, Batch, BatchState, LearningMode, Policy, PolicyState, Sample, VersionState
from app.policies import repository
from app.policies.overrides import effective_settings
from app.policies.references import version_name
from app.training import line_moves, sample_conditions, service
from app.training.caps import even_share, max_samples
from app.training.plan_batch import plan_batch
from app.training.policy_config import effective_rollouts
from app.training.sample_columns import consenting_samples, is_open
from app.training.service import SampleCounts, count_first, how_to_continue


class Wait(NamedTuple):
    """What the next batch waits for: a sentence, and the setting that decides it, if one does."""

    sentence: str
    setting: str | None = None


TOO_MANY = Wait(
    "Not known: so many samples are ready that only the assembly finds out how many of them are within all caps "
    "together. If no update begins for long, see which raters they are of, and the caps (raters.max_*_share)."
)


async def explain_wait(
    session: AsyncSession, policy: Policy, counts: SampleCounts, settings: Settings, *, triggered: bool
) -> Wait:
    """Return what the next batch waits for. `triggered`: an operator has requested a batch."""
    settings = effective_settings(policy, settings)
    if policy.state != PolicyState.ACTIVE:
        return Wait(f"The policy is {policy.state}{how_to_continue(policy)}.")
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
    if counts.is_limited and wait != TOO_MANY:
        return wait._replace(
            sentence=f"{wait.sentence} This is about the first {service.MAX_COUNTED:,} of the ready samples."
        )
    return wait


async def _explain_samples(
    session: AsyncSession, policy: Policy, counts: SampleCounts, settings: Settings, *, triggered: bool
) -> Wait:
    """Return what the samples that are counted lack for a batch. `settings` are the policy's own."""
    min_size = service.min_samples(settings, is_triggered=triggered)
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
    if counts.is_limited:
        return TOO_MANY
    return await _explain_plan(session, policy, counts, settings, min_size)


async def _explain_plan(
    session: AsyncSession, policy: Policy, counts: SampleCounts, settings: Settings, min_size: int
) -> Wait:
    """Return what the plan of the next batch lacks where the samples suffice by their numbers, and by each cap alone.

    Only then is it planned, and not where more samples wait than are counted: that reads more than a page should.
    """
    plan = await plan_batch(session, policy, settings, lock=False)
    if plan.samples:
        return Wait(f"Nothing. {len(plan.samples)} samples are about to be put into a batch.")
    if plan.seconds_left > 0:
        return Wait(
            f"{plan.num_missing} more ready samples, since {plan.num_selected} are within all caps together; in "
            f"{plan.seconds_left:.0f} s fewer are enough.",
            "trainer.max_wait_seconds",
        )
    if plan.num_selected >= min_size:
        return Wait(
            f"Samples of other raters: the {plan.num_selected} that are within all caps together have fewer than "
            f"{settings.raters.min_raters}.",
            "raters.min_raters",
        )
    is_new = (Sample.policy_id == policy.id, is_open(), Sample.origin.is_(None))
    if await session.scalar(select(exists().where(*is_new))):
        return Wait("Nothing. New samples are about to be prepared.")
    return Wait(
        f"At least {min_size - plan.num_selected} more ready samples of other raters, conversations or prompts: "
        f"{plan.num_selected} of the {counts.usable} ready samples are within all caps together and can be compared. "
        "Raters of reduced trust (raters.trust) and prompt sets (rollouts.max_plan_share) have lower caps.",
    )


def _advise_groups(policy: Policy, settings: Settings) -> str:
    if effective_rollouts(policy, settings).group_sampling.extra_replies:
        return "Group sampling is on: wait for new replies,"
    return "Turn on group sampling (ATTUNE_ROLLOUTS)"


async def _count_without_consent(session: AsyncSession, policy: Policy) -> int:
    ready = (Sample.policy_id == policy.id, is_open(), Sample.ready_at <= now())
    is_consenting = await consenting_samples(session, policy.project_id)
    without = select(Sample.turn_id).where(*ready, ~is_consenting)
    return int(await session.scalar(select(count_first(without))) or 0)


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
