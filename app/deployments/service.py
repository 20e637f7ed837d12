"""The one gesture that changes who is answered by what: moving a pointer.

    proven ──▶ live ──▶ superseded            live, canary ──▶ rolled back
         └──▶ canary ──▶ live                 on its way home ──▶ rejected

New turns take what is pointed to from the moment a move is committed; running turns end on theirs. No engine reloads
anything: a version that fewer than half of the ready engines hold is a 409. Full weights are another matter: engines
follow the pointer, and new turns wait until one has (docs/full-weights.md). With no engine ready the pointer moves all
the same: an engine takes traffic only when it holds what serves. Publishing, deploying and rolling back take the
policy's lock, so that there is one move at a time; chats, which refer to the policy, do not wait for it.
"""

from sqlalchemy import update
from sqlalchemy.ext.asyncio import AsyncSession

from app.core.database import now
from app.core.errors import Conflict, NotFound
from app.core.jobs import enqueue_after_commit
from app.core.settings import Settings
from app.models import SERVED_TRAFFIC, Deployment, Policy, Version, VersionState, record_audit
from app.policies import repository
from app.policies.service import carried, label, ready_engines
from app.training import kl_guard

TAKEN_BACK = "taken back before it went live"
GONE_BACK = "learning went back to another version before this one was published"


async def locked(session: AsyncSession, policy: Policy) -> Deployment:
    await session.get(Policy, policy.id, with_for_update={"key_share": True}, populate_existing=True)
    return await session.get_one(Deployment, policy.id, populate_existing=True)


async def point_to(session: AsyncSession, policy: Policy, version: Version, *, actor: str, reason: str | None) -> None:
    """New turns take `version`, and learning goes on from it: what was learned from another is left behind. Was it the
    canary, none is out any more; another one's figures begin anew, for it is compared with what serves."""
    deployment = await repository.deployment_of(session, policy.id)
    old = await repository.version(session, deployment.version_id)
    old.state = VersionState.SUPERSEDED
    version.state, version.reason = VersionState.LIVE, None
    version.live_at = now()
    if deployment.canary_version_id == version.id:
        _no_canary(deployment)
    elif deployment.canary_version_id is not None:
        deployment.canary_since = now()
    await _move(session, deployment, version)
    policy.head_version_id = version.id
    record_audit(
        session, actor, "deploy", label(policy, version), reason, project_id=policy.project_id, previous=old.number
    )


async def promote(session: AsyncSession, policy: Policy, canary: Version, *, actor: str, reason: str | None) -> None:
    """The canary for everybody. The caller has the lock."""
    newest = policy.head_version_id == canary.id
    await point_to(session, policy, canary, actor=actor, reason=reason)
    if newest:  # else nothing new was learned, and nothing is over
        await kl_guard.went_live(session, policy, label(policy, canary))
    enqueue_after_commit(session, "reconcile", "assemble")


async def deploy(
    session: AsyncSession, policy: Policy, number: int, *, actor: str, reason: str | None
) -> tuple[Version, Version]:
    """Point to a version that people have heard, or to the canary; learning goes on from it. Idempotent. Returns
    (left, taken)."""
    deployment = await locked(session, policy)
    left = await repository.version(session, deployment.version_id)
    target = await heard(session, policy, number)
    if target.id == left.id:
        return left, target
    await _loaded(session, policy, target, left)
    if target.id == deployment.canary_version_id:
        await promote(session, policy, target, actor=actor, reason=reason)
    else:
        await point_to(session, policy, target, actor=actor, reason=reason)
        enqueue_after_commit(session, "assemble")
    return left, target


async def begin_canary(
    session: AsyncSession,
    policy: Policy,
    version: Version,
    share: float,
    *,
    watched: bool,
    actor: str,
    reason: str | None,
) -> None:
    """So much of the policy's conversations goes to `version`. Of the canary that is out already the share changes, and
    its figures begin anew: those of two shares cannot be compared. Raises Conflict while there is another, and for the
    version that serves. The caller has the lock."""
    deployment = await repository.deployment_of(session, policy.id)
    if version.id == deployment.version_id:
        raise Conflict(f"{label(policy, version)} serves already.", code="already_serving")
    if deployment.canary_version_id not in (None, version.id):
        other = await repository.version(session, deployment.canary_version_id or "")
        raise Conflict(f"{label(policy, other)} is the canary; end that first.", code="canary_out")
    await _loaded(session, policy, version, await repository.version(session, deployment.version_id))
    if deployment.canary_version_id is None:
        deployment.canary_version_id = version.id
        version.state = VersionState.CANARY
        deployment.epoch += 1
    if deployment.canary_share != share:
        deployment.canary_since = now()
    deployment.canary_share, deployment.canary_watched = share, watched
    project_id = policy.project_id
    record_audit(
        session, actor, "canary", label(policy, version), reason, project_id=project_id, share=share, watched=watched
    )


async def end_canary(session: AsyncSession, policy: Policy, *, actor: str, reason: str | None) -> Version | None:
    """Everybody is back on what serves, and so is learning. None when no canary is out. The caller has the lock."""
    deployment = await repository.deployment_of(session, policy.id)
    if deployment.canary_version_id is None:
        return None
    version = await repository.version(session, deployment.canary_version_id)
    ahead = not await _stands_on(session, deployment.version_id, version)
    if ahead and await _stands_on(session, policy.head_version_id, version):
        policy.head_version_id = deployment.version_id
    version.state, version.reason = VersionState.ROLLED_BACK, reason or TAKEN_BACK
    _no_canary(deployment)
    deployment.epoch += 1
    record_audit(session, actor, "canary ended", label(policy, version), reason, project_id=policy.project_id)
    enqueue_after_commit(session, "assemble")
    return version


async def roll_back(
    session: AsyncSession,
    policy: Policy,
    number: int | None,
    *,
    undo: int | None = None,
    actor: str,
    reason: str | None,
) -> tuple[Version, Version]:
    """Undo the latest step, or go back to an older version, and let learning go on from there. Returns (left, taken).

    With a number it is idempotent, and ends a canary too; so it is with the version that is to be undone. With
    neither, a canary is what is undone, if there is one; else it goes back one step each time.
    """
    deployment = await locked(session, policy)
    left = await repository.version(session, deployment.version_id)
    canary_alone = number is None and deployment.canary_version_id is not None
    if undo is not None:
        undone = await heard(session, policy, undo)
        if undone.id == left.id:
            canary_alone = False
        elif undone.id != deployment.canary_version_id:
            if undone.state == VersionState.ROLLED_BACK:
                return undone, left
            told = f"{label(policy, left)} serves by now, and not {label(policy, undone)}."
            raise Conflict(told, code="not_serving")
    if canary_alone:
        canary = await end_canary(session, policy, actor=actor, reason=reason)
        assert canary is not None
        return canary, left
    if number is None:
        if left.parent_id is None:
            raise Conflict(f"{label(policy, left)} is the first version; there is nothing to go back to.")
        target = await repository.version(session, left.parent_id)
    else:
        target = await heard(session, policy, number)
    if target.id == deployment.canary_version_id:
        raise Conflict(f"{label(policy, target)} is the canary: promote it, or end it.", code="canary_out")
    if target.id != left.id:
        await _loaded(session, policy, target, left)
    ended = await end_canary(session, policy, actor=actor, reason=reason)
    if target.id == left.id:
        return ended or left, target
    left.state, left.reason = VersionState.ROLLED_BACK, reason
    target.state, target.reason = VersionState.LIVE, None
    if target.live_at is None:  # it was a canary once
        target.live_at = now()
    policy.head_version_id = target.id
    await _move(session, deployment, target)
    record_audit(
        session, actor, "rollback", label(policy, target), reason, project_id=policy.project_id, left=left.number
    )
    return left, target


async def reject(
    session: AsyncSession, policy: Policy, version: Version, *, actor: str, reason: str, alarm: Settings | None = None
) -> None:
    """Nobody ever hears it; learning goes back to what serves. With `alarm` the guard is told: some in a row halt it.
    The caller has the lock."""
    version.state, version.reason = VersionState.REJECTED, reason
    if policy.head_version_id == version.id:
        policy.head_version_id = (await repository.deployment_of(session, policy.id)).version_id
    if alarm is not None:
        await kl_guard.alarm(session, policy, reason, alarm)
    record_audit(session, actor, "version rejected", label(policy, version), reason, project_id=policy.project_id)
    enqueue_after_commit(session, "assemble")


async def heard(session: AsyncSession, policy: Policy, number: int) -> Version:
    """Raises NotFound for a version that never served."""
    wanted = await repository.version_numbered(session, policy.id, number)
    if wanted is None or wanted.state not in SERVED_TRAFFIC:
        raise NotFound(f"Policy '{policy.name}' has never served a version v{number}.", code="model_not_found")
    return wanted


async def _loaded(session: AsyncSession, policy: Policy, version: Version, left: Version) -> None:
    if version.full_weights or left.full_weights:  # it comes when the other goes: who asks meanwhile waits
        enqueue_after_commit(session, "evaluate")
        return
    engines = await ready_engines(session, lock=True)
    if engines and not carried(version, engines):
        raise Conflict(f"{label(policy, version)} is not loaded on enough ready engines.", code="version_not_loaded")


async def _stands_on(session: AsyncSession, version_id: str | None, ground: Version) -> bool:
    """Whether it is `ground`, or was learned from it over any number of steps."""
    at = await session.get(Version, version_id) if version_id else None
    while at is not None and at.id != ground.id and at.number > ground.number and at.parent_id:
        at = await session.get(Version, at.parent_id)
    return at is not None and at.id == ground.id


def _no_canary(deployment: Deployment) -> None:
    deployment.canary_version_id = deployment.canary_since = None
    deployment.canary_share, deployment.canary_watched = 0.0, False


async def _move(session: AsyncSession, deployment: Deployment, version: Version) -> None:
    await session.flush()
    await session.execute(
        update(Deployment)
        .where(Deployment.policy_id == deployment.policy_id)
        .values(
            version_id=version.id,
            previous_version_id=Deployment.version_id,
            epoch=Deployment.epoch + 1,
            changed_at=now(),
        )
        .execution_options(synchronize_session=False)
    )
    session.expire(deployment)
