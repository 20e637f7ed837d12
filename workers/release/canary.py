"""Decide watched canaries by their metrics: promote them to live, or roll them back."""

import logging
from typing import NamedTuple

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from alignment.release.canary import CanaryConfig
from app.core.database import Database
from app.core.settings import Settings
from app.deployments import canary
from app.deployments import service as deployment_service
from app.models import Deployment, Policy
from app.policies import references, repository, service
from workers.queue.retry import log_and_continue

log = logging.getLogger("attune.canaries")
IS_WATCHED = Deployment.canary_watched & Deployment.canary_version_id.is_not(None)


class Decision(NamedTuple):
    """What to do with one run of a canary. The first three fields identify the run."""

    version_id: str
    since: float | None
    baseline_id: str
    action: str
    reason: str


async def check_canaries(db: Database, settings: Settings) -> int:
    """Check every watched canary. Return how many ended."""
    async with db.read() as session:
        policy_ids = list(await session.scalars(select(Deployment.policy_id).where(IS_WATCHED)))
    message = "the canary of %s could not be checked; the next reconcile tries again"
    return sum([await log_and_continue(_check(db, settings, id), log, message, id) for id in policy_ids])


async def _check(db: Database, settings: Settings, policy_id: str) -> bool:
    async with db.read() as session:  # a transaction of its own: it is slow, and chats need the rows that _apply locks
        decision = await _decide(session, policy_id, settings)
    if decision is None:
        return False
    async with db.write() as session:
        return await _apply(session, policy_id, decision)


async def _decide(session: AsyncSession, policy_id: str, settings: Settings) -> Decision | None:
    """Return the decision, or None if the metrics do not allow one yet."""
    deployment = await repository.get_deployment(session, policy_id)
    policy = await session.get_one(Policy, policy_id)
    if not deployment.canary_watched or deployment.canary_version_id is None:
        return None
    config = canary.effective_canary(policy, settings) or CanaryConfig()
    _, _, verdict = await canary.evaluate_canary(session, deployment, config)
    if verdict.action == "wait":
        return None
    run = deployment.canary_version_id, deployment.canary_since, deployment.version_id
    return Decision(*run, verdict.action, verdict.reason)


async def _apply(session: AsyncSession, policy_id: str, decision: Decision) -> bool:
    policy = await session.get_one(Policy, policy_id)
    deployment = await deployment_service.lock_deployment(session, policy)
    run = deployment.canary_version_id, deployment.canary_since, deployment.version_id
    if run != decision[:3] or not deployment.canary_watched:
        return False  # the deployment changed meanwhile
    version = await repository.get_version(session, decision.version_id)
    if decision.action == "roll_back":
        await deployment_service.abort_canary(session, policy, actor="watch", reason=decision.reason)
    else:
        if not service.is_loaded_on_quorum(version, await service.list_ready_engines(session)):
            return False  # too few engines hold it at the moment; the next reconcile checks again
        await deployment_service.promote_canary(session, policy, version, actor="watch", reason=decision.reason)
    log.info("%s: %s, %s", references.version_name(policy, version), decision.action, decision.reason)
    return True
