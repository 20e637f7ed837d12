"""How a policy's learning stands: its mode, the samples that wait, what is missing for the next batch; and a nudge."""

from collections.abc import Collection
from typing import NamedTuple

from sqlalchemy import case, func, select
from sqlalchemy.ext.asyncio import AsyncSession

from app.core.database import now
from app.core.errors import Conflict, NotFound
from app.core.jobs import enqueue_after_commit
from app.core.settings import Settings
from app.models import (
    ONCE_LIVE,
    Audit,
    Batch,
    BatchState,
    LearningMode,
    Policy,
    Sample,
    SampleState,
    Version,
    VersionState,
    record_audit,
)
from app.policies import repository, service
from app.training import batch_caps

TRIGGER = "trigger batch"  # of the audit: a batch of two samples is enough, until one is frozen
FEWEST = 2


class Waiting(NamedTuple):
    """Samples that may still be learned from. `ripe` ones may go into the next batch, `unripe` ones wait for late
    words, `held` ones for an admin. `raters`: distinct ones behind the ripe, each machine's sample counting as one."""

    ripe: int
    unripe: int
    held: int
    raters: int
    since: float | None  # when the first of them was ripe
    clock: float


async def waiting(session: AsyncSession, policy: Policy, settings: Settings) -> Waiting:
    ripe = (Sample.state == SampleState.OPEN) & (Sample.ready_at <= now())
    asked = select(
        func.count(case((ripe, 1))),
        func.count(case(((Sample.state == SampleState.OPEN) & (Sample.ready_at > now()), 1))),
        func.count(case((Sample.state == SampleState.QUARANTINED, 1))),
        func.count(case((ripe, Sample.rater)).distinct()) + func.count(case((ripe & Sample.rater.is_(None), 1))),
        func.min(case((ripe, Sample.ready_at))),
        now(),
    ).where(
        Sample.policy_id == policy.id,
        Sample.state.in_((SampleState.OPEN, SampleState.QUARANTINED)),
        Sample.version_id.in_(await _speakers(session, policy, settings)),
    )
    return Waiting(*(await session.execute(asked)).one())


async def _speakers(session: AsyncSession, policy: Policy, settings: Settings) -> list[str]:
    """The versions whose samples are fresh enough; after an alarm the head alone."""
    steps = 0 if policy.mode == LearningMode.SYNCHRONOUS else settings.max_staleness
    return [version.id for version in await repository.ancestry(session, policy.head_version_id or "", steps)]


async def missing(session: AsyncSession, policy: Policy, waits: Waiting, settings: Settings, *, at_once: bool) -> str:
    """What the next batch waits for, in words. `at_once`: somebody has asked for it."""
    if policy.mode == LearningMode.HALTED:
        return "Learning is halted until an operator resumes it."
    under_way = await session.scalar(
        select(Batch.id).where(Batch.policy_id == policy.id, Batch.state == BatchState.OPEN).limit(1)
    )
    if under_way is not None:
        return f"An update is under way: {under_way}."
    head = await repository.version(session, policy.head_version_id or "")
    if head.state == VersionState.CANARY:
        return f"{service.label(policy, head)} is a canary: learning goes on when it is live, or taken back."
    if head.state == VersionState.SHADOW:
        return f"{service.label(policy, head)} is in shadow: learning goes on when it is live, or rejected."
    if head.state not in ONCE_LIVE:
        return f"{service.label(policy, head)} has yet to be published."
    smallest = FEWEST if at_once else settings.smallest_batch
    if waits.ripe < smallest:
        return f"{smallest - waits.ripe} more ripe samples."
    if waits.raters < settings.min_raters:
        return f"{settings.min_raters - waits.raters} more raters."
    size = min(waits.ripe, settings.batch_size)
    speakers = await _speakers(session, policy, settings)
    fits, whose = await batch_caps.fitting(session, policy, speakers, settings.batch_size, waits.raters, settings)
    if fits < size:
        size = fits
        if fits < smallest:
            return (
                f"{smallest - fits} more ripe samples of other {whose}s at least: of the {waits.ripe} ripe ones no "
                f"more than {fits} may be in one batch (ATTUNE_MAX_{whose.upper()}_SHARE)."
            )
    left = settings.max_wait_seconds - (waits.clock - (waits.clock if waits.since is None else waits.since))
    if size < settings.batch_size and not at_once and left > 0:
        more = settings.batch_size - size
        of_others = f" of other {whose}s" if size < waits.ripe else ""
        return f"{more} more ripe samples{of_others}; in {left:.0f} s those that are there will do."
    return (
        f"Nothing that is counted here: {size} ripe samples are within each share. They may be fewer within all shares "
        "at once, in a batch that is smaller, and where a rater is not fully believed (ATTUNE_TRUST) or many samples "
        "are a prompt set's."
    )


async def locked(session: AsyncSession, project_id: str, name: str) -> Policy:
    """For whoever changes how it learns: assembling and publishing take the same lock."""
    policy = await service.named(session, project_id, name)
    return await session.get_one(Policy, policy.id, with_for_update={"key_share": True}, populate_existing=True)


async def trigger(session: AsyncSession, policy: Policy, *, actor: str, reason: str | None) -> None:
    """Raises Conflict while learning is halted."""
    if policy.mode == LearningMode.HALTED:
        raise Conflict(f"Learning of '{policy.name}' is halted; resume it first.", code="learning_halted")
    record_audit(session, actor, TRIGGER, policy.name, reason, project_id=policy.project_id)
    enqueue_after_commit(session, "curate", "assemble")


async def triggered(session: AsyncSession, policy: Policy) -> bool:
    """Has somebody asked for a batch since the last one was frozen? The entry in the audit is the flag."""
    asked = select(func.max(Audit.created_at)).where(
        Audit.project_id == policy.project_id, Audit.action == TRIGGER, Audit.subject == policy.name
    )
    frozen = select(func.max(Batch.created_at)).where(Batch.policy_id == policy.id)
    at, last = await session.scalar(asked), await session.scalar(frozen)
    return at is not None and (last is None or at > last)


async def updates(session: AsyncSession, policy: Policy, after: str | None, limit: int) -> list[Batch]:
    """Batches, the newest first; one more than `limit` tells that there is more. Raises NotFound."""
    asked = select(Batch).where(Batch.policy_id == policy.id)
    if after is not None:
        last = await session.scalar(asked.where(Batch.id == after))
        if last is None:
            raise NotFound(f"There is no update '{after}'.", param="after")
        older = (Batch.created_at == last.created_at) & (Batch.id < last.id)
        asked = asked.where((Batch.created_at < last.created_at) | older)
    return list(await session.scalars(asked.order_by(Batch.created_at.desc(), Batch.id.desc()).limit(limit + 1)))


async def numbers(session: AsyncSession, ids: Collection[str | None]) -> dict[str, int]:
    rows = await session.execute(select(Version.id, Version.number).where(Version.id.in_(ids)))
    return {id: number for id, number in rows}
