"""Proven version → shadow, canary or live: enough ready engines hold it, then one transaction says which."""

import time

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from app.core.database import Database
from app.core.jobs import enqueue_after_commit
from app.core.settings import Settings
from app.deployments import canary_metrics, shadow
from app.deployments import service as deployment_service
from app.models import Policy, Version, VersionState
from app.policies import repository, service
from app.training import kl_guard

WAITS = (VersionState.VERIFIED, VersionState.SHADOW_PASSED)


async def publish(db: Database, settings: Settings) -> int:
    """Publish what was proven and could not be published then, and what has passed its shadow deployment. Returns how many people hear
    now."""
    async with db.read() as session:
        proven = await session.execute(
            select(Version.policy_id, Version.id).where(Version.state.in_(WAITS)).order_by(Version.number)
        )
    return sum([await _publish(db, settings, *ids) for ids in proven])


async def _publish(db: Database, settings: Settings, policy_id: str, version_id: str) -> bool:
    started = time.perf_counter()
    async with db.write() as session:
        policy = await session.get_one(Policy, policy_id, with_for_update={"key_share": True})
        heard = await move(session, settings, policy, version_id)
    if heard:
        await timed(db, version_id, time.perf_counter() - started)
    return heard


async def move(session: AsyncSession, settings: Settings, policy: Policy, version_id: str) -> bool:
    """The pointer to a proven version, or the canary's share. False when it waits, runs in shadow first, was rejected, or
    somebody else was first. The caller has the policy's lock, so there is one publisher at a time."""
    version = await session.get_one(Version, version_id, populate_existing=True)
    engines = await service.ready_engines(session)
    if version.state not in WAITS or not engines:
        return False  # the sweep rings again when one is back
    if policy.head_version_id != version.id:
        await deployment_service.reject(session, policy, version, actor="publish", reason=deployment_service.GONE_BACK)
        return False
    canary = None if version.full_weights else canary_metrics.config_of(policy, settings)
    deployment = await repository.deployment_of(session, policy.id)
    if deployment.canary_version_id is not None and (canary is not None or deployment.canary_watched):
        return False  # it is compared with what serves now; the sweep rings again when it has ended
    if not service.carried(version, engines):
        version.state = VersionState.TRAINED  # an engine came back without it: prove it there first
        enqueue_after_commit(session, "evaluate")
        return False
    shown = version.shadow_since is not None or version.full_weights  # what it has shown need not be shown again
    shadow_config = None if shown else shadow.config_of(policy, settings)
    told = {"actor": "publish", "reason": str(version.state)}
    if shadow_config is not None:
        shadow.begin(session, policy, version, shadow_config.share, **told)
        return False
    if canary is not None:
        await deployment_service.begin_canary(session, policy, version, canary.share, watched=True, **told)
    else:
        await deployment_service.point_to(session, policy, version, **told)
        await kl_guard.went_live(session, policy, service.label(policy, version))
        enqueue_after_commit(session, "reconcile", "assemble")
        if version.full_weights:  # the other replicas follow
            enqueue_after_commit(session, "evaluate")
    return True


async def timed(db: Database, version_id: str, switched: float) -> None:
    """`switched`: seconds of the transaction that moved the pointer. Apart from it, so that what is timed has
    happened."""
    async with db.write() as session:
        version = await session.get_one(Version, version_id)
        heard_at = version.live_at
        if heard_at is None:
            heard_at = (await repository.deployment_of(session, version.policy_id)).canary_since
        if heard_at is None:
            return  # a canary that somebody ended at once
        version.timings = {**version.timings, "switch": switched}
        if version.shadow_since is None:  # else most of it was waiting for what it has to show
            served = heard_at - version.created_at + version.timings["export"]
            version.timings = {**version.timings, "trained_to_served": served}
