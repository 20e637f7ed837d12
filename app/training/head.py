"""The head of a policy: the version that the next update starts from. Moving it gives samples back, or takes them.

The line of a version is the version with its ancestors. Where the head moves to a version of another line, the versions
that leave the line give back the samples that they have learned from, and those that join it take theirs back. So no
sample is used twice in one line.
"""

from collections.abc import Sequence
from typing import NamedTuple

from sqlalchemy import exists, select
from sqlalchemy.ext.asyncio import AsyncSession

from app.models import AuditAction, Batch, BatchState, Policy, Reward, SampleRule, Turn, Version, record_audit
from app.policies.references import format_reference, version_name
from app.training import batch_samples
from app.training.automated_samples import is_from_person

ACTOR = "trainer"  # of audit entries
PAGE_SIZE = 1000  # versions that are read at once
MAX_UNDONE = 200  # versions whose samples move at once, with as many statements as those of one


class LineVersion(NamedTuple):
    """A version in a line; `batch_id` is the batch that it has learned from."""

    id: str
    number: int
    parent_id: str | None
    batch_id: str | None


async def move_head(session: AsyncSession, policy: Policy, version: Version) -> None:
    """Let training continue from this version. The caller holds the policy's lock.

    Batches of another parent can no longer be committed: they fail, and their samples return. Of each version that
    leaves the line, the samples return if no person has judged a reply of it, and wait for new feedback; otherwise they
    are dropped.
    """
    previous_id, policy.head_version_id = policy.head_version_id, version.id
    if previous_id is None or previous_id == version.id:
        return
    await _fail_batches(session, policy, version)
    leaving, joining = await compare_lines(session, previous_id, version.id)
    for start in range(0, len(leaving), MAX_UNDONE):
        await _undo(session, policy, leaving[start : start + MAX_UNDONE])
    for start in range(0, len(joining), MAX_UNDONE):
        joined = joining[start : start + MAX_UNDONE]
        await batch_samples.reclaim_samples(session, [row.batch_id for row in joined if row.batch_id is not None])


async def return_rejected(session: AsyncSession, policy: Policy, version: Version, reason: str) -> None:
    """Return the samples of a version that was rejected."""
    if version.batch_id is not None:
        reason = f"{version_name(policy, version)} was rejected: {reason}"
        await batch_samples.return_samples(session, [version.batch_id], reason, SampleRule.VERSION_REJECTED)


async def _fail_batches(session: AsyncSession, policy: Policy, head: Version) -> None:
    other_parent = (Batch.policy_id == policy.id, Batch.state == BatchState.OPEN, Batch.parent_id != head.id)
    batch_ids = list(await session.scalars(select(Batch.id).where(*other_parent)))
    reason = f"training returned to {version_name(policy, head)}"
    for batch_id in await batch_samples.break_up_batches(session, batch_ids, BatchState.FAILED, reason):
        record_audit(session, ACTOR, AuditAction.BATCH_FAILED, batch_id, reason, project_id=policy.project_id)


async def _undo(session: AsyncSession, policy: Policy, versions: Sequence[LineVersion]) -> None:
    judged = await _find_judged(session, versions)
    reasons: dict[str, str] = {}
    unjudged: list[str] = []
    for version in versions:
        if version.batch_id is not None and version.id in judged:
            name = format_reference(policy.name, version.number)
            reasons[version.batch_id] = f"{name} learned from it; people judged that version, and it was undone"
        elif version.batch_id is not None:
            unjudged.append(version.batch_id)
    await batch_samples.drop_trained(session, reasons, SampleRule.ROLLED_BACK)
    await batch_samples.return_samples(session, unjudged, batch_samples.UNDONE, SampleRule.ROLLED_BACK)


async def _find_judged(session: AsyncSession, versions: Sequence[LineVersion]) -> set[str]:
    """Return those of the versions on whose replies a person has given explicit feedback."""
    judged = exists().where(Turn.version_id == Version.id, Reward.turn_id == Turn.id, is_from_person())
    rows = await session.scalars(select(Version.id).where(Version.id.in_([row.id for row in versions]), judged))
    return set(rows)


async def compare_lines(session: AsyncSession, old_id: str, new_id: str) -> tuple[list[LineVersion], list[LineVersion]]:
    """Return the versions that are in the line of `old_id` alone, and those in that of `new_id` alone."""
    known: dict[str, LineVersion] = {}

    async def find(id: str) -> LineVersion:
        if id not in known:
            await _read_page(session, id, known)
        return known[id]

    old, new = await find(old_id), await find(new_id)
    leaving: list[LineVersion] = []
    joining: list[LineVersion] = []
    while old.id != new.id:  # a version's number is larger than its parent's
        later, side = (old, leaving) if old.number > new.number else (new, joining)
        side.append(later)
        assert later.parent_id is not None, "the versions of a policy descend from its first one"
        parent = await find(later.parent_id)
        old, new = (parent, new) if later is old else (old, parent)
    return leaving, joining


async def _read_page(session: AsyncSession, id: str, known: dict[str, LineVersion]) -> None:
    """Read a version and those of its policy with the next smaller numbers, most of which are its ancestors."""
    first = select(Version.policy_id, Version.number).where(Version.id == id).subquery()
    columns = (Version.id, Version.number, Version.parent_id, Version.batch_id)
    page = select(*columns).join(first, Version.policy_id == first.c.policy_id)
    page = page.where(Version.number <= first.c.number).order_by(Version.number.desc()).limit(PAGE_SIZE)
    known |= {row.id: LineVersion(*row) for row in await session.execute(page)}
