"""The head of a policy: the version that the next update starts from. Moving it gives samples back, or takes them.

The line of a version is the version with its ancestors. Where the head moves to a version of another line, the versions
that leave the line give back the samples that they have learned from, and those that join it take theirs back. So no
sample is used twice in one line.
"""

from sqlalchemy import exists, select
from sqlalchemy.ext.asyncio import AsyncSession

from app.models import AuditAction, Batch, BatchState, Policy, Reward, SampleRule, Turn, Version, record_audit
from app.policies.references import version_name
from app.policies.repository import get_version
from app.training import batch_samples
from app.training.human_labels import is_from_person

ACTOR = "trainer"  # of audit entries


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
    for left in leaving:
        await _undo(session, policy, left)
    for joined in joining:
        await batch_samples.reclaim_samples(session, joined)


async def return_rejected(session: AsyncSession, policy: Policy, version: Version, reason: str) -> None:
    """Return the samples of a version that was rejected."""
    if version.batch_id is not None:
        reason = f"{version_name(policy, version)} was rejected: {reason}"
        await batch_samples.return_samples(session, version.batch_id, reason, SampleRule.VERSION_REJECTED)


async def _fail_batches(session: AsyncSession, policy: Policy, head: Version) -> None:
    other_parent = (Batch.policy_id == policy.id, Batch.state == BatchState.OPEN, Batch.parent_id != head.id)
    batch_ids = list(await session.scalars(select(Batch.id).where(*other_parent)))
    reason = f"training returned to {version_name(policy, head)}"
    for batch_id in await batch_samples.break_up_batches(session, batch_ids, BatchState.FAILED, reason):
        record_audit(session, ACTOR, AuditAction.BATCH_FAILED, batch_id, reason, project_id=policy.project_id)


async def _undo(session: AsyncSession, policy: Policy, version: Version) -> None:
    if version.batch_id is None:
        return
    name = version_name(policy, version)
    if await _is_judged(session, version):
        reason = f"{name} learned from it; people judged that version, and it was undone"
        await batch_samples.drop_trained(session, version.batch_id, SampleRule.ROLLED_BACK, reason)
    else:
        await batch_samples.return_samples(session, version.batch_id, batch_samples.UNDONE, SampleRule.ROLLED_BACK)


async def _is_judged(session: AsyncSession, version: Version) -> bool:
    """Whether a person has given explicit feedback on a reply of the version."""
    judged = exists().where(Turn.version_id == version.id, Reward.turn_id == Turn.id, is_from_person())
    return bool(await session.scalar(select(judged)))


async def compare_lines(session: AsyncSession, old_id: str, new_id: str) -> tuple[list[Version], list[Version]]:
    """Return the versions that are in the line of `old_id` alone, and those in that of `new_id` alone."""
    old, new = await get_version(session, old_id), await get_version(session, new_id)
    leaving: list[Version] = []
    joining: list[Version] = []
    while old.id != new.id:  # a version's number is larger than its parent's
        later, side = (old, leaving) if old.number > new.number else (new, joining)
        side.append(later)
        assert later.parent_id is not None, "the versions of a policy descend from its first one"
        parent = await get_version(session, later.parent_id)
        old, new = (parent, new) if later is old else (old, parent)
    return leaving, joining
