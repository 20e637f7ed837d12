"""Watched canaries → live, or taken back: as their figures say."""

import logging
from typing import NamedTuple

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from alignment.release.canary import CanaryConfig
from app.core.database import Database
from app.core.settings import Settings
from app.deployments import canary_metrics
from app.deployments import service as deployment_service
from app.models import Deployment, Policy
from app.policies import repository, service
from workers.queue.retry import spared

log = logging.getLogger("attune.canaries")
WATCHED = Deployment.canary_watched & Deployment.canary_version_id.is_not(None)


class Judged(NamedTuple):
    """Of which run of which canary beside which version, and what follows."""

    version_id: str
    since: float | None
    beside: str
    action: str
    reason: str


async def watch(db: Database, settings: Settings) -> int:
    """Look at every canary that is out. Returns how many ended."""
    async with db.read() as session:
        policies = list(await session.scalars(select(Deployment.policy_id).where(WATCHED)))
    told = "the canary of %s could not be looked at; the next sweep tries again"
    return sum([await spared(_watch(db, settings, id), log, told, id) for id in policies])


async def _watch(db: Database, settings: Settings, policy_id: str) -> bool:
    async with db.read() as session:  # apart from the move: it counts, and chats need the rows it would lock
        judged = await _judge(session, policy_id, settings)
    if judged is None:
        return False
    async with db.write() as session:
        return await _end(session, policy_id, judged)


async def _judge(session: AsyncSession, policy_id: str, settings: Settings) -> Judged | None:
    """None: nothing is decided yet."""
    deployment = await repository.deployment_of(session, policy_id)
    policy = await session.get_one(Policy, policy_id)
    if not deployment.canary_watched or deployment.canary_version_id is None:
        return None
    config = canary_metrics.config_of(policy, settings) or CanaryConfig()
    _, _, verdict = await canary_metrics.judged(session, deployment, config)
    if verdict.action == "wait":
        return None
    at = deployment.canary_version_id, deployment.canary_since, deployment.version_id
    return Judged(*at, verdict.action, verdict.reason)


async def _end(session: AsyncSession, policy_id: str, judged: Judged) -> bool:
    policy = await session.get_one(Policy, policy_id)
    deployment = await deployment_service.locked(session, policy)
    now_out = deployment.canary_version_id, deployment.canary_since, deployment.version_id
    if now_out != judged[:3] or not deployment.canary_watched:
        return False  # somebody was quicker
    version = await repository.version(session, judged.version_id)
    if judged.action == "roll_back":
        await deployment_service.end_canary(session, policy, actor="watch", reason=judged.reason)
    else:
        if not service.carried(version, await service.ready_engines(session)):
            return False  # nobody can say just now that it works; the next sweep looks again
        await deployment_service.promote(session, policy, version, actor="watch", reason=judged.reason)
    log.info("%s: %s, %s", service.label(policy, version), judged.action, judged.reason)
    return True
