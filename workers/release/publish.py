"""Publish verified versions as shadow, canary or live: enough ready engines hold it, then one transaction decides."""

import time

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from app.core.database import Database
from app.core.jobs import enqueue_after_commit
from app.core.settings import Settings
from app.deployments import comparison
from app.deployments import service as deployment_service
from app.models import Policy, Version, VersionState
from app.policies import references, repository, service
from app.training import kl_guard

PUBLISHABLE_STATES = (VersionState.VERIFIED, VersionState.SHADOW_PASSED)


async def publish(db: Database, settings: Settings) -> int:
    """Publish the versions that passed shadow, and the verified ones that could not be published at once.

    Returns how many serve users now.
    """
    async with db.read() as session:
        rows = await session.execute(
            select(Version.policy_id, Version.id).where(Version.state.in_(PUBLISHABLE_STATES)).order_by(Version.number)
        )
    return sum([await _publish(db, settings, *row) for row in rows])


async def _publish(db: Database, settings: Settings, policy_id: str, version_id: str) -> bool:
    started = time.perf_counter()
    async with db.write() as session:
        policy = await session.get_one(Policy, policy_id, with_for_update={"key_share": True})
        serves_users = await try_publish(session, settings, policy, version_id)
    if serves_users:
        await record_timings(db, version_id, time.perf_counter() - started)
    return serves_users


async def try_publish(session: AsyncSession, settings: Settings, policy: Policy, version_id: str) -> bool:
    """Point the deployment, or the canary's share, to a verified version. Return whether it serves users now.

    It does not when it must wait, starts in shadow, was rejected, or another publisher was first. The caller holds the
    policy's lock, so there is one publisher at a time.
    """
    version = await session.get_one(Version, version_id, populate_existing=True)
    engines = await service.list_ready_engines(session)
    if version.state not in PUBLISHABLE_STATES or not engines:
        return False  # the reconciler enqueues it again when an engine is ready
    if policy.head_version_id != version.id:
        await deployment_service.reject_version(
            session, policy, version, actor="publish", reason=deployment_service.HEAD_MOVED
        )
        return False
    canary_config = None if version.full_weights else comparison.effective_canary(policy, settings)
    deployment = await repository.get_deployment(session, policy.id)
    if deployment.canary_version_id is not None and (canary_config is not None or deployment.canary_watched):
        return False  # the canary is compared with the serving version; the reconciler tries again when it has ended
    if not service.is_loaded_on_quorum(version, engines):
        version.state = VersionState.TRAINED  # an engine came back without it: load and verify it there first
        enqueue_after_commit(session, "evaluate")
        return False
    skips_shadow = version.shadow_since is not None or version.full_weights
    shadow_config = None if skips_shadow else comparison.effective_shadow(policy, settings)
    audit = {"actor": "publish", "reason": str(version.state)}
    if shadow_config is not None:
        deployment_service.start_shadow(session, policy, version, shadow_config.share, **audit)
        return False
    if canary_config is not None:
        await deployment_service.start_canary(session, policy, version, canary_config.share, watched=True, **audit)
    else:
        await deployment_service.set_live(session, policy, version, **audit)
        kl_guard.record_release(session, policy, references.version_name(policy, version))
        enqueue_after_commit(session, "reconcile", "assemble")
        if version.full_weights:  # loads it on the other engines
            enqueue_after_commit(session, "evaluate")
    return True


async def record_timings(db: Database, version_id: str, switch_seconds: float) -> None:
    """Record how long the release took.

    `switch_seconds` is the duration of the transaction that moved the deployment. It is known only after that
    transaction, so this is a transaction of its own.
    """
    async with db.write() as session:
        version = await session.get_one(Version, version_id)
        served_at = version.live_at or (await repository.get_deployment(session, version.policy_id)).canary_since
        if served_at is None:
            return  # a canary that an operator ended at once
        version.timings = {**version.timings, "switch": switch_seconds}
        if version.shadow_since is None:  # otherwise most of the time was spent in shadow
            trained_to_served = served_at - version.created_at + version.timings["export"]
            version.timings = {**version.timings, "trained_to_served": trained_to_served}
