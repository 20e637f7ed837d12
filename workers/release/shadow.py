"""Decide shadow deployments by their judged replies: the version has passed, or it is rejected."""

import logging

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from alignment.release.canary import Decision
from alignment.release.shadow import disabled_reason
from app.core.database import Database
from app.core.settings import Settings
from app.deployments import service as deployment_service
from app.deployments import shadow
from app.models import Policy, Version, VersionState
from app.policies import references, repository
from app.training.reward_config import effective_rewards
from workers.queue.retry import log_and_continue

log = logging.getLogger("attune.shadow")


async def check_shadow_deployments(db: Database, settings: Settings) -> int:
    """Check every version in shadow. Return how many shadow deployments ended."""
    async with db.read() as session:
        version_ids = list(await session.scalars(select(Version.id).where(Version.state == VersionState.SHADOW)))
    message = "the shadow deployment of %s could not be checked; the next reconcile tries again"
    return sum([await log_and_continue(_check(db, settings, id), log, message, id) for id in version_ids])


async def _check(db: Database, settings: Settings, version_id: str) -> bool:
    async with db.read() as session:  # a transaction of its own: it is slow, and chats need the rows that _apply locks
        serving_id, verdict = await _decide(session, version_id, settings)
    if verdict.action == "wait":
        return False
    async with db.write() as session:
        return await _apply(session, version_id, serving_id, verdict, settings)


async def _decide(session: AsyncSession, version_id: str, settings: Settings) -> tuple[str, Decision]:
    """Return the id of the serving version and the verdict against it."""
    version = await repository.get_version(session, version_id)
    policy = await session.get_one(Policy, version.policy_id)
    serving_id = (await repository.get_deployment(session, policy.id)).version_id
    config, rewards = shadow.active_shadow_config(policy, settings), effective_rewards(policy, settings)
    if policy.head_version_id != version.id:
        return serving_id, Decision("lapse", deployment_service.HEAD_MOVED, {})
    if (obstacle := disabled_reason(config, rewards)) is not None:  # a version that cannot be compared has not passed
        return serving_id, Decision("lapse", f"it cannot run in shadow: {obstacle}", {})
    *_, counted, verdict = await shadow.evaluate_shadow(session, version, serving_id, config, rewards)
    counts = {"better": counted.better, "alike": counted.tied, "worse": counted.worse}
    return serving_id, Decision(verdict.action, verdict.reason, {**verdict.figures, **counts})


async def _apply(
    session: AsyncSession, version_id: str, serving_id: str, verdict: Decision, settings: Settings
) -> bool:
    version = await repository.get_version(session, version_id)
    policy = await session.get_one(Policy, version.policy_id)
    deployment = await deployment_service.lock_deployment(session, policy)
    await session.refresh(version)
    if version.state != VersionState.SHADOW or deployment.version_id != serving_id:
        return False  # the deployment changed meanwhile
    version.metrics = {**version.metrics, **{f"shadow/{name}": value for name, value in verdict.figures.items()}}
    if verdict.action == "promote":
        shadow.pass_shadow(session, policy, version, actor="watch", reason=verdict.reason)
    else:
        reason = verdict.reason if verdict.reason == deployment_service.HEAD_MOVED else f"shadow: {verdict.reason}"
        # Only a rejection counts for the KL guard: a lapse says nothing about the version.
        alarm = settings if verdict.action == "reject" else None
        await deployment_service.reject_version(session, policy, version, actor="watch", reason=reason, alarm=alarm)
    log.info("%s: %s, %s", references.version_name(policy, version), verdict.action, verdict.reason)
    return True
