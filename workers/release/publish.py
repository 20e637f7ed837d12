"""Bring verified versions to users, as shadow, canary or live, and end the canaries and shadow deployments.

Publishing: enough ready engines hold the version, then one transaction decides. The comparison with the serving version
is read in a transaction of its own: it is slow, and chats need the rows that are locked to apply its decision.
"""

import logging
import time

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from alignment.release.canary import CanaryConfig, Decision
from alignment.release.shadow import disabled_reason
from app.core.database import Database
from app.core.jobs import enqueue_after_commit
from app.core.run_each import run_each, take_turns
from app.core.settings import Settings
from app.deployments import comparison
from app.deployments import service as deployment_service
from app.engines import fleet
from app.models import ANSWERING, Deployment, Policy, Version, VersionState
from app.policies import references, repository, service
from app.policies.locks import LockedPolicy, lock_policy
from app.policies.overrides import effective_settings
from app.training import kl_guard
from app.training.policy_config import effective_rewards
from workers.queue.leased_job import log_and_continue
from workers.release.delivery.base import Delivery
from workers.release.delivery.choice import delivery_of
from workers.stage_metrics import PUBLISH_SECONDS

canary_log = logging.getLogger("attune.canaries")
shadow_log = logging.getLogger("attune.shadow")
IS_WATCHED = Deployment.canary_watched & Deployment.canary_version_id.is_not(None)
CanaryRun = tuple[str | None, float | None, str]  # the canary, since when, and the version it is compared with
ERASED_DATA = "it has learned from data that was erased, and the version that serves has not"
PUBLISHABLE_STATES = (VersionState.VERIFIED, VersionState.SHADOW_PASSED)


async def publish(db: Database, settings: Settings) -> int:
    """Publish the versions that passed shadow, and the verified ones that could not be published at once.

    Returns how many serve users now.
    """
    async with db.read() as session:
        rows = await session.execute(
            select(Policy.project_id, Version.policy_id, Version.id)
            .join(Policy, Policy.id == Version.policy_id)
            .where(Version.state.in_(PUBLISHABLE_STATES), Policy.state.in_(ANSWERING))
            .order_by(Version.number)
        )
    waiting = take_turns((project_id, (policy_id, version_id)) for project_id, policy_id, version_id in rows)
    return await run_each(waiting, lambda row: _publish(db, settings, *row), "publishing")


async def _publish(db: Database, settings: Settings, policy_id: str, version_id: str) -> bool:
    started = time.perf_counter()
    async with db.write() as session:
        locked = await lock_policy(session, policy_id)
        serves_users = await try_publish(locked, settings, delivery_of(settings), version_id)
    if serves_users:
        await record_timings(db, version_id, time.perf_counter() - started)
    return serves_users


async def try_publish(locked: LockedPolicy, settings: Settings, delivery: Delivery, version_id: str) -> bool:
    """Point the deployment, or the canary's share, to a verified version. Return whether it serves users now.

    It does not when it must wait, starts in shadow, was rejected, or another publisher was first. Under the lock there
    is one publisher at a time.
    """
    session, policy = locked
    version = await session.get_one(Version, version_id, populate_existing=True)
    engines = await fleet.list_ready_engines(session)
    is_loaded = fleet.is_loaded_on_quorum(version, engines)
    if version.state not in PUBLISHABLE_STATES or policy.state not in ANSWERING or not engines:
        return False  # the reconciler enqueues it again when an engine is ready
    if policy.head_version_id != version.id:
        await deployment_service.reject_version(locked, version, actor="publish", reason=deployment_service.HEAD_MOVED)
        return False
    trials = delivery.trials(policy, settings)
    deployment = await repository.get_deployment(session, policy.id)
    if await _would_release_erased_data(session, deployment, version):
        await deployment_service.reject_version(locked, version, actor="publish", reason=ERASED_DATA)
        return False
    if deployment.canary_version_id is not None and (trials.canary is not None or deployment.canary_watched):
        return False  # the canary is compared with the serving version; the reconciler tries again when it has ended
    if not is_loaded:
        version.state = VersionState.TRAINED  # an engine came back without it: load and verify it there first
        enqueue_after_commit(session, "evaluate")
        return False
    by = service.Attribution("publish", str(version.state))
    if trials.shadow is not None and version.shadow_since is None:
        deployment_service.start_shadow(locked, version, trials.shadow.share, by)
        return False
    if trials.canary is not None:
        await deployment_service.start_canary(locked, version, trials.canary.share, by, watched=True)
    else:
        await deployment_service.set_live(locked, version, by)
        kl_guard.record_release(locked, references.version_name(policy, version))
        enqueue_after_commit(session, *delivery.tasks_after_release)
    return True


async def _would_release_erased_data(session: AsyncSession, deployment: Deployment, version: Version) -> bool:
    """Whether the version has learned from erased data, and the one that serves has not.

    Where the serving version has, too, learning goes on as before: an operator has to roll back.
    """
    if await repository.find_untainted_ancestor(session, version.policy_id, version) is None:
        return False
    serving = await repository.get_version(session, deployment.version_id)
    return await repository.find_untainted_ancestor(session, version.policy_id, serving) is None


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
    for phase, seconds in version.timings.items():
        PUBLISH_SECONDS.labels(phase).observe(seconds)


async def check_canaries(db: Database, settings: Settings) -> int:
    """Check every watched canary: it is promoted to live, or rolled back. Return how many ended."""
    async with db.read() as session:
        policy_ids = list(await session.scalars(select(Deployment.policy_id).where(IS_WATCHED)))
    message = "the canary of %s could not be checked; the next reconcile tries again"
    return sum([await log_and_continue(_check_canary(db, settings, id), canary_log, message, id) for id in policy_ids])


async def check_shadow_deployments(db: Database, settings: Settings) -> int:
    """Check every version in shadow: it has passed, or it is rejected. Return how many shadow deployments ended."""
    async with db.read() as session:
        version_ids = list(await session.scalars(select(Version.id).where(Version.state == VersionState.SHADOW)))
    message = "the shadow deployment of %s could not be checked; the next reconcile tries again"
    return sum([await log_and_continue(_check_shadow(db, settings, id), shadow_log, message, id) for id in version_ids])


async def _check_canary(db: Database, settings: Settings, policy_id: str) -> bool:
    async with db.read() as session:
        deployment = await repository.get_deployment(session, policy_id)
        policy = await session.get_one(Policy, policy_id)
        if not deployment.canary_watched or deployment.canary_version_id is None:
            return False
        config = comparison.effective_canary(policy, settings) or CanaryConfig()
        *_, decision = await comparison.evaluate_canary(session, deployment, config)
    if decision.action == "wait":
        return False
    async with db.write() as session:
        return await _apply_to_canary(session, policy_id, _canary_run(deployment), decision)


async def _apply_to_canary(session: AsyncSession, policy_id: str, run: CanaryRun, decision: Decision) -> bool:
    locked = await lock_policy(session, policy_id)
    deployment = await repository.get_deployment(session, policy_id)
    if _canary_run(deployment) != run or not deployment.canary_watched:
        return False  # the deployment changed meanwhile
    version = await repository.get_version(session, run[0] or "")
    if decision.action == "promote" and await _would_release_erased_data(session, deployment, version):
        decision = Decision("roll_back", ERASED_DATA, decision.figures)
    by = service.Attribution("reconcile", decision.reason)
    if decision.action == "roll_back":
        await deployment_service.abort_canary(locked, by)
    else:
        if not fleet.is_loaded_on_quorum(version, await fleet.list_ready_engines(session)):
            return False  # too few engines hold it at the moment; the next reconcile checks again
        await deployment_service.promote_canary(locked, version, by)
    canary_log.info("%s: %s, %s", references.version_name(locked.policy, version), decision.action, decision.reason)
    return True


def _canary_run(deployment: Deployment) -> CanaryRun:
    return deployment.canary_version_id, deployment.canary_since, deployment.version_id


async def _check_shadow(db: Database, settings: Settings, version_id: str) -> bool:
    async with db.read() as session:
        version = await repository.get_version(session, version_id)
        policy = await session.get_one(Policy, version.policy_id)
        serving_id = (await repository.get_deployment(session, policy.id)).version_id
        decision = await _decide_shadow(session, policy, version, serving_id, settings)
    if decision.action == "wait":
        return False
    async with db.write() as session:
        return await _apply_to_shadow(session, version_id, serving_id, decision, settings)


async def _decide_shadow(
    session: AsyncSession, policy: Policy, version: Version, serving_id: str, settings: Settings
) -> Decision:
    config, rewards = comparison.active_shadow_config(policy, settings), effective_rewards(policy, settings)
    if policy.head_version_id != version.id:
        return Decision("lapse", deployment_service.HEAD_MOVED, {})
    if (obstacle := disabled_reason(config, rewards)) is not None:  # a version that cannot be compared has not passed
        return Decision("lapse", f"it cannot run in shadow: {obstacle}", {})
    *_, counted, decision = await comparison.evaluate_shadow(session, version, serving_id, config, rewards)
    counts = {"better": counted.better, "tied": counted.tied, "worse": counted.worse}
    return Decision(decision.action, decision.reason, {**decision.figures, **counts})


async def _apply_to_shadow(
    session: AsyncSession, version_id: str, serving_id: str, decision: Decision, settings: Settings
) -> bool:
    version = await repository.get_version(session, version_id)
    locked = await lock_policy(session, version.policy_id)
    policy = locked.policy
    deployment = await repository.get_deployment(session, policy.id)
    await session.refresh(version)
    if version.state != VersionState.SHADOW or deployment.version_id != serving_id:
        return False  # the deployment changed meanwhile
    version.metrics = {**version.metrics, **{f"shadow/{name}": value for name, value in decision.figures.items()}}
    if decision.action == "promote":
        deployment_service.pass_shadow(locked, version, service.Attribution("reconcile", decision.reason))
    else:
        reason = decision.reason if decision.reason == deployment_service.HEAD_MOVED else f"shadow: {decision.reason}"
        # Only a rejection counts for the KL guard: a lapse says nothing about the version.
        guard = effective_settings(policy, settings) if decision.action == "reject" else None
        await deployment_service.reject_version(locked, version, actor="reconcile", reason=reason, guard=guard)
    shadow_log.info("%s: %s, %s", references.version_name(policy, version), decision.action, decision.reason)
    return True
