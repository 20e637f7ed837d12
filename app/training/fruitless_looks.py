"""Looks of the assembly that found no batch: they are not repeated while nothing that they depend on has changed."""

import hashlib
from typing import NamedTuple

from sqlalchemy import ColumnElement, func, select
from sqlalchemy.ext.asyncio import AsyncSession

from app.core.database import database_time, dialect_insert
from app.core.settings import Settings
from app.models import ApiKey, AssemblyLook, Policy, Project, Sample
from app.training.sample_columns import is_open

# A transaction may commit its samples that long after their `changed_at`, and then they are new to the next look.
COMMIT_SECONDS = 30.0
# Raters gain and lose trust, and samples leave the open state, without a change that is looked for: so look again then.
LOOK_SECONDS = 60.0


class Look(NamedTuple):
    """A look at the samples of a policy: when it began, and the hash of what it depends on besides them."""

    policy_id: str
    time: float
    conditions: str

    async def is_repetition(self, session: AsyncSession) -> bool:
        """Return whether the last look found nothing, and this one can find nothing more."""
        last = await session.get(AssemblyLook, self.policy_id)
        if last is None or last.conditions != self.conditions or self.time >= last.next_at:
            return False
        if self.time < last.looked_at:  # the database's clock was set back
            return False
        changed_at = await session.scalar(select(func.max(Sample.changed_at)).where(*_is_open(self.policy_id)))
        return changed_at is None or changed_at < last.looked_at - COMMIT_SECONDS

    async def record(self, session: AsyncSession, max_wait_seconds: float) -> None:
        """Record that this look has found no batch."""
        ready_at = await _first_ready_at(session, self.policy_id, self.time)
        waited_at = await _first_ready_at(session, self.policy_id, self.time - max_wait_seconds)
        times = [self.time + LOOK_SECONDS]
        times += [] if ready_at is None else [ready_at]
        times += [] if waited_at is None else [waited_at + max_wait_seconds]
        values = {
            "looked_at": self.time,
            "next_at": min(times),
            "conditions": self.conditions,
            "no_contrast_at": None,
        }
        insert = dialect_insert(session, AssemblyLook).values(policy_id=self.policy_id, **values)
        await session.execute(insert.on_conflict_do_update(index_elements=["policy_id"], set_=values))


async def begin_look(session: AsyncSession, policy: Policy, settings: Settings, *, is_triggered: bool) -> Look:
    """Begin a look at a policy's samples. `settings` are the policy's own."""
    trains = await session.scalar(select(Project.train).where(Project.id == policy.project_id))
    keys = select(ApiKey.id, ApiKey.train).where(ApiKey.project_id == policy.project_id, ApiKey.train.is_not(None))
    consent = [tuple(row) for row in await session.execute(keys.order_by(ApiKey.id))]
    sections = (settings.algorithm, settings.trainer, settings.raters, settings.rollouts)
    parts = (policy.head_version_id, policy.mode, trains, consent, is_triggered, sections)
    digest = hashlib.sha256(repr(parts).encode()).hexdigest()
    return Look(policy.id, await database_time(session), digest)


def _is_open(policy_id: str) -> tuple[ColumnElement[bool], ...]:
    return Sample.policy_id == policy_id, is_open()


async def _first_ready_at(session: AsyncSession, policy_id: str, after: float) -> float | None:
    """Return when the first open sample becomes ready after a time."""
    return await session.scalar(
        select(Sample.ready_at).where(*_is_open(policy_id), Sample.ready_at > after).order_by(Sample.ready_at).limit(1)
    )
