"""The head of a policy: the version that the next update starts from. Moving it gives samples back, or takes them.

Where the head moves to a version of another line, the versions that leave the line give back the samples that they have
learned from, and those that join it take theirs back (app/training/line_moves.py). So no sample is used twice in one
line.
"""

from sqlalchemy import select

from app.models import TRAINER, AuditAction, Batch, BatchState, SampleRule, Version, record_audit
from app.policies.locks import LockedPolicy
from app.policies.references import version_name
from app.training import batch_samples, line_moves


async def move_head(locked: LockedPolicy, version: Version) -> None:
    """Let training continue from this version.

    Batches of another parent can no longer be committed: they fail, and their samples return. The samples of the
    versions that leave or join the line follow in steps. No batch is assembled meanwhile.
    """
    policy = locked.policy
    previous_id, policy.head_version_id = policy.head_version_id, version.id
    if previous_id is None or previous_id == version.id:
        return
    await _fail_batches(locked, version)
    await line_moves.begin_move(locked, previous_id, version.id)


async def return_rejected(locked: LockedPolicy, version: Version, reason: str) -> None:
    """Return the samples of a version that was rejected, after the moves that are not finished."""
    session, policy = locked
    if version.batch_id is None:
        return
    reason = f"{version_name(policy, version)} was rejected: {reason}"
    if version.parent_id is not None and await line_moves.is_moving(session, policy.id):
        await line_moves.begin_move(locked, version.id, version.parent_id, rejection=reason)
    else:
        await batch_samples.return_samples(locked, [version.batch_id], reason, SampleRule.VERSION_REJECTED)


async def _fail_batches(locked: LockedPolicy, head: Version) -> None:
    session, policy = locked
    other_parent = (Batch.policy_id == policy.id, Batch.state == BatchState.OPEN, Batch.parent_id != head.id)
    batch_ids = list(await session.scalars(select(Batch.id).where(*other_parent)))
    reason = f"training returned to {version_name(policy, head)}"
    for batch_id in await batch_samples.break_up_batches(locked, batch_ids, BatchState.FAILED, reason):
        record_audit(session, TRAINER, AuditAction.BATCH_FAILED, batch_id, reason, project_id=policy.project_id)
