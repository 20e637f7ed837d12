"""The deployment of a policy: which version serves, the canary, the version in shadow, rollback.

    verified ──▶ live ──▶ superseded                  live, canary ──▶ rolled_back
       │ └──▶ canary ──▶ live                         trained … shadow_passed ──▶ rejected
       └──▶ shadow ──▶ shadow_passed ──▶ canary or live

A release is one update of the deployment's row. New turns use the new version from the moment the transaction commits;
running turns finish on theirs. Engines reload nothing: a version that fewer than half of the ready engines have loaded
is refused (409). Full weights are different: the engines follow the deployment, and new turns wait until one has the
weights (docs/full-weights.md). With no engine ready the deployment changes all the same, because an engine takes
traffic only once it has loaded what serves.

Publishing, deploying and rolling back lock the policy's row, so that one runs at a time. Chats refer to the policy and
do not wait for this lock.
"""

from sqlalchemy.ext.asyncio import AsyncSession

from app.core.database import now
from app.core.errors import Conflict, NotFound
from app.core.jobs import enqueue_after_commit
from app.core.settings import Settings
from app.engines.fleet import is_loaded_on_quorum, list_ready_engines
from app.models import SERVED_TRAFFIC, AuditAction, Deployment, Policy, Version, VersionState
from app.policies import repository
from app.policies.locks import LockedPolicy
from app.policies.references import version_name
from app.policies.repository import descends_from
from app.policies.service import Attribution, audit_policy, require_files
from app.training import head, kl_guard
from app.training.vote_totals import reopen_votes_of_batches

CANARY_ABORTED = "the canary was aborted"
HEAD_MOVED = "training returned to another version before this one was published"


async def set_live(locked: LockedPolicy, version: Version, by: Attribution) -> None:
    """Make `version` the one that serves, and the one that training continues from.

    If `version` was the canary, no canary is left. The statistics of another canary restart, because a canary is
    compared with what serves.
    """
    session, policy = locked
    deployment = await repository.get_deployment(session, policy.id)
    previous = await repository.get_version(session, deployment.version_id)
    previous.state = VersionState.SUPERSEDED
    version.state, version.reason = VersionState.LIVE, None
    version.live_at = now()
    await reopen_votes_of_batches(session, version.batch_id)
    if deployment.canary_version_id == version.id:
        _clear_canary(deployment)
    elif deployment.canary_version_id is not None:
        deployment.canary_since = now()
    _point_to(deployment, version)
    await head.move_head(locked, version)
    audit_policy(session, policy, AuditAction.DEPLOYMENT_DEPLOYED, *by, subject=version, previous=previous.number)


async def promote_canary(locked: LockedPolicy, canary: Version, by: Attribution) -> None:
    """Make the canary live."""
    session, policy = locked
    is_head = policy.head_version_id == canary.id
    await set_live(locked, canary, by)
    if is_head:  # an older version that goes live does not end a synchronous round
        kl_guard.record_release(locked, version_name(policy, canary))
    enqueue_after_commit(session, "reconcile", "assemble")


async def deploy(locked: LockedPolicy, number: int, by: Attribution) -> None:
    """Make a version live that has served traffic, or the canary. Idempotent. Raises NotFound, Conflict."""
    session, policy = locked
    deployment = await repository.get_deployment(session, policy.id)
    previous = await repository.get_version(session, deployment.version_id)
    target = await get_served_version(session, policy, number)
    if target.id == previous.id:
        return
    await require_untainted(session, policy, target)
    await _require_loaded(session, policy, target, previous)
    if target.id == deployment.canary_version_id:
        await promote_canary(locked, target, by)
    else:
        await set_live(locked, target, by)
        enqueue_after_commit(session, "assemble")


async def start_canary(locked: LockedPolicy, version: Version, share: float, by: Attribution, *, watched: bool) -> None:
    """Route a share of the policy's conversations to `version`.

    For the current canary this changes its share. Then its statistics restart, because those of two shares cannot be
    compared. Raises Conflict for the version that serves, and while there is another canary.
    """
    session, policy = locked
    deployment = await repository.get_deployment(session, policy.id)
    if version.id == deployment.version_id:
        raise Conflict(f"{version_name(policy, version)} serves already.", code="already_serving")
    if deployment.canary_version_id not in (None, version.id):
        other = await repository.get_version(session, deployment.canary_version_id or "")
        raise Conflict(f"{version_name(policy, other)} is the canary; promote or abort it first.", code="canary_active")
    await _require_loaded(session, policy, version, await repository.get_version(session, deployment.version_id))
    if deployment.canary_version_id is None:
        deployment.canary_version_id = version.id
        version.state = VersionState.CANARY
        deployment.epoch += 1
    if deployment.canary_share != share:
        deployment.canary_since = now()
    deployment.canary_share, deployment.canary_watched = share, watched
    audit_policy(session, policy, AuditAction.CANARY_BEGAN, *by, subject=version, share=share, watched=watched)


async def abort_canary(locked: LockedPolicy, by: Attribution) -> Version | None:
    """Route everybody to the version that serves, and continue training from it.

    Returns the version that was the canary, or None without one.
    """
    session, policy = locked
    deployment = await repository.get_deployment(session, policy.id)
    if deployment.canary_version_id is None:
        return None
    canary = await repository.get_version(session, deployment.canary_version_id)
    is_ahead = not await descends_from(session, deployment.version_id, canary)
    if is_ahead and await descends_from(session, policy.head_version_id, canary):
        await head.move_head(locked, await repository.get_version(session, deployment.version_id))
    canary.state, canary.reason = VersionState.ROLLED_BACK, by.reason or CANARY_ABORTED
    await reopen_votes_of_batches(session, canary.batch_id)
    _clear_canary(deployment)
    deployment.epoch += 1
    audit_policy(session, policy, AuditAction.CANARY_ENDED, *by, subject=canary)
    enqueue_after_commit(session, "assemble")
    return canary


async def roll_back(
    locked: LockedPolicy, number: int | None, by: Attribution, *, from_version: int | None = None
) -> tuple[Version, Version]:
    """Undo the latest release, or return to an older version; training continues from there.

    - With `number`, that version serves. Idempotent; a canary is aborted too.
    - With `from_version`, that version stops serving, or stops being the canary. Idempotent.
    - With neither, a canary is aborted if there is one; else the parent of the version that serves takes over.

    Returns the version that was rolled back and the version that serves now. Raises NotFound, Conflict.
    """
    session, policy = locked
    deployment = await repository.get_deployment(session, policy.id)
    serving = await repository.get_version(session, deployment.version_id)
    abort_only = number is None and deployment.canary_version_id is not None
    if from_version is not None:
        source = await get_served_version(session, policy, from_version)
        if source.id == serving.id:
            abort_only = False
        elif source.id != deployment.canary_version_id:
            if source.state == VersionState.ROLLED_BACK:
                return source, serving
            message = f"{version_name(policy, source)} does not serve: {version_name(policy, serving)} serves now."
            raise Conflict(message, code="not_serving")
    if abort_only:
        return await abort_canary(locked, by) or serving, serving
    if number is None:
        if serving.parent_id is None:
            raise Conflict(f"{version_name(policy, serving)} is the first version; there is none to roll back to.")
        target = await repository.get_version(session, serving.parent_id)
        require_files(policy, target)
    else:
        target = await get_served_version(session, policy, number)
    if target.id == deployment.canary_version_id:
        raise Conflict(f"{version_name(policy, target)} is the canary: promote or abort it.", code="canary_active")
    if target.id != serving.id:
        await require_untainted(session, policy, target)
        await _require_loaded(session, policy, target, serving)
    aborted = await abort_canary(locked, by)
    if target.id == serving.id:
        return aborted or serving, target
    serving.state, serving.reason = VersionState.ROLLED_BACK, by.reason
    target.state, target.reason = VersionState.LIVE, None
    await reopen_votes_of_batches(session, serving.batch_id, target.batch_id)
    if target.live_at is None:  # it has served as a canary only
        target.live_at = now()
    await head.move_head(locked, target)
    _point_to(deployment, target)
    audit_policy(session, policy, AuditAction.DEPLOYMENT_ROLLED_BACK, *by, subject=target, previous=serving.number)
    return serving, target


def start_shadow(locked: LockedPolicy, version: Version, share: float, by: Attribution) -> None:
    """Let the version answer a `share` of the replies' prompts in shadow."""
    session, policy = locked
    version.state, version.shadow_since = VersionState.SHADOW, now()
    audit_policy(session, policy, AuditAction.SHADOW_BEGAN, *by, subject=version, share=share)


def pass_shadow(locked: LockedPolicy, version: Version, by: Attribution) -> None:
    """Let the version in shadow go on to publishing."""
    session, policy = locked
    version.state = VersionState.SHADOW_PASSED
    audit_policy(session, policy, AuditAction.SHADOW_PASSED, *by, subject=version)
    enqueue_after_commit(session, "publish")


async def reject_version(
    locked: LockedPolicy, version: Version, *, actor: str, reason: str, guard: Settings | None = None
) -> None:
    """Reject a version that has not served; training continues from the version that serves. Its samples return.

    With `guard`, the settings of the KL guard, the rejection counts as an alarm: several in a row halt training.
    """
    session, policy = locked
    version.state, version.reason = VersionState.REJECTED, reason
    await head.return_rejected(locked, version, reason)
    if policy.head_version_id == version.id:
        serving_id = (await repository.get_deployment(session, policy.id)).version_id
        await head.move_head(locked, await repository.get_version(session, serving_id))
    if guard is not None:
        kl_guard.raise_alarm(locked, reason, guard)
    audit_policy(session, policy, AuditAction.VERSION_REJECTED, actor, reason, subject=version)
    enqueue_after_commit(session, "assemble")


async def get_served_version(session: AsyncSession, policy: Policy, number: int) -> Version:
    """Return the version. Raises NotFound for a version that never served traffic."""
    version = await repository.find_version(session, policy.id, number)
    if version is None or version.state not in SERVED_TRAFFIC:
        raise NotFound(f"Policy '{policy.name}' has never served a version v{number}.", code="model_not_found")
    require_files(policy, version)
    return version


async def require_untainted(session: AsyncSession, policy: Policy, version: Version) -> None:
    """Raise Conflict if the version, or one of its ancestors, has learned from data that is erased."""
    ancestor = await repository.find_untainted_ancestor(session, policy.id, version)
    if ancestor is not None:
        message = (
            f"{version_name(policy, version)} has learned from data that was erased. The last version before it that "
            f"has not is {version_name(policy, ancestor)}: deploy that one, or roll back to it."
        )
        raise Conflict(message, code="version_tainted", param="version")


async def _require_loaded(session: AsyncSession, policy: Policy, version: Version, serving: Version) -> None:
    """Raise Conflict if too few ready engines have loaded `version`; full weights are loaded after the release."""
    if version.weights != serving.weights:  # of what each engine holds only one
        enqueue_after_commit(session, "evaluate")
        return
    engines = await list_ready_engines(session, lock=True)
    if engines and not is_loaded_on_quorum(version, engines):
        message = f"{version_name(policy, version)} is not loaded on enough ready engines."
        raise Conflict(message, code="version_not_loaded")


def _clear_canary(deployment: Deployment) -> None:
    deployment.canary_version_id = deployment.canary_since = None
    deployment.canary_share, deployment.canary_watched = 0.0, False


def _point_to(deployment: Deployment, version: Version) -> None:
    deployment.previous_version_id, deployment.version_id = deployment.version_id, version.id
    deployment.epoch += 1
    deployment.changed_at = now()
