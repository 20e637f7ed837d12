"""Decide the next batch of a policy: its samples, or what they lack. Its size is decided here and nowhere else.

The assembly freezes the plan, and the API says what it waits for.
"""

from typing import NamedTuple

from sqlalchemy.ext.asyncio import AsyncSession

from app.core.database import database_time
from app.core.settings import Settings
from app.models import Policy, Sample
from app.training import sample_conditions, sample_failures, service
from app.training.select_samples import SamplePool, select_samples


class BatchPlan(NamedTuple):
    """The samples of the next batch, or none.

    `num_selected` ready samples can be in one batch: they are within all caps, and give contrast. If they are none,
    there is no contrast, or there are no such samples. `seconds_left` is how long they still wait for `num_missing`
    others, with which the batch would be full; 0 if that is over.
    """

    samples: list[Sample]
    num_selected: int
    num_missing: int = 0
    seconds_left: float = 0.0


async def plan_batch(session: AsyncSession, policy: Policy, settings: Settings, *, lock: bool = True) -> BatchPlan:
    """Return the samples of the next batch, or none.

    Args:
        settings: those of the policy.
        lock: Lock the samples, to freeze them.
    """
    # While samples of quarantined batches are ready, the batch begins with those that failed most often and is half as
    # large for each of their failures. So a sample that no update can use is soon alone with few others. If there is no
    # such batch, the other samples go on.
    is_usable = await sample_conditions.usable_samples(session, policy, settings)
    pool = SamplePool(policy.id, is_usable, lock=lock)
    if num_failures := await sample_failures.max_failures(session, policy, settings):
        size = max(2, settings.trainer.batch_size >> num_failures)
        smaller = {
            "trainer.min_batch_size": min(settings.trainer.smallest_batch, size),
            "raters.min_raters": min(settings.raters.min_raters, size),
        }
        smaller_batch = settings.replace({"trainer.batch_size": size, "trainer.max_batch_size": size, **smaller})
        with_failed = await _plan_from(session, policy, pool.failed_first(), smaller_batch)
        if with_failed.samples:
            return with_failed
        plan = await _plan_from(session, policy, pool.without_failed(), settings)
        waits = [one for one in (plan, with_failed) if one.seconds_left > 0]
        return plan if plan.samples or not waits else min(waits, key=lambda one: one.seconds_left)
    return await _plan_from(session, policy, pool, settings)


async def _plan_from(session: AsyncSession, policy: Policy, pool: SamplePool, settings: Settings) -> BatchPlan:
    """Plan a full batch, or a smaller one if its oldest sample waited long enough or an operator triggered it.

    A full batch takes all ready samples, up to the largest size: those that are left wait for a whole update.
    """
    samples = await select_samples(session, pool, settings.trainer.largest_batch, settings)
    # The caps are shares of the batch: a smaller batch has lower caps.
    if len(samples) < settings.trainer.largest_batch:
        samples = await select_samples(session, pool, max(settings.trainer.batch_size, len(samples)), settings)
    num_selected = len(samples)
    if num_selected < settings.trainer.batch_size:
        is_triggered = await service.is_triggered(session, policy)
        min_samples = service.min_samples(settings, is_triggered=is_triggered)
        if num_selected < min_samples:
            return BatchPlan([], num_selected)
        waited_seconds = await database_time(session) - min(sample.ready_at for sample in samples)
        if not is_triggered and waited_seconds < settings.trainer.max_wait_seconds:
            num_missing = settings.trainer.batch_size - num_selected
            return BatchPlan([], num_selected, num_missing, settings.trainer.max_wait_seconds - waited_seconds)
        samples = await select_samples(session, pool, num_selected, settings)
        num_selected = len(samples)
        if num_selected < min_samples:
            return BatchPlan([], num_selected)
    raters = {sample.rater for sample in samples if sample.rater is not None}
    num_without_rater = sum(sample.rater is None for sample in samples)
    has_enough_raters = len(raters) + num_without_rater >= settings.raters.min_raters
    return BatchPlan(samples if has_enough_raters else [], num_selected)
