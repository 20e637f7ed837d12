"""Shadow deployments → passed its shadow deployment, or rejected: as what was judged says."""

import logging

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from alignment.release.canary import Verdict
from alignment.release.shadow import idle
from app.core.database import Database
from app.core.settings import Settings
from app.deployments import service as deployment_service
from app.deployments import shadow, shadow_metrics
from app.models import Policy, Version, VersionState
from app.policies import repository, service
from app.training.policy_rewards import rewards_of
from workers.queue.retry import spared

log = logging.getLogger("attune.shadow")


async def watch(db: Database, settings: Settings) -> int:
    """Look at every version in shadow. Returns how many ended it."""
    async with db.read() as session:
        shadow = select(Version.id).where(Version.state == VersionState.SHADOW)
        version_ids = list(await session.scalars(shadow))
    told = "the shadow deployment of %s could not be looked at; the next sweep tries again"
    return sum([await spared(_watch(db, settings, id), log, told, id) for id in version_ids])


async def _watch(db: Database, settings: Settings, version_id: str) -> bool:
    async with db.read() as session:  # apart from the move: it counts, and chats need the rows it would lock
        serving_id, verdict = await _judge(session, version_id, settings)
    if verdict.action == "wait":
        return False
    async with db.write() as session:
        return await _end(session, version_id, serving_id, verdict, settings)


async def _judge(session: AsyncSession, version_id: str, settings: Settings) -> tuple[str, Verdict]:
    """Beside what serves just now, whose id comes with it."""
    version = await repository.version(session, version_id)
    policy = await session.get_one(Policy, version.policy_id)
    serving_id = (await repository.deployment_of(session, policy.id)).version_id
    config, rewards = shadow.kept(policy, settings), rewards_of(policy, settings)
    if policy.head_version_id != version.id:
        return serving_id, Verdict("lapse", deployment_service.GONE_BACK, {})
    if (told := idle(config, rewards)) is not None:  # what cannot be shown has not been
        return serving_id, Verdict("lapse", f"it cannot run in shadow: {told}", {})
    *_, counted, verdict = await shadow_metrics.judged(session, version, serving_id, config, rewards)
    counts = {"better": counted.better, "alike": counted.alike, "worse": counted.worse}
    return serving_id, Verdict(verdict.action, verdict.reason, {**verdict.figures, **counts})


async def _end(session: AsyncSession, version_id: str, serving_id: str, verdict: Verdict, settings: Settings) -> bool:
    version = await repository.version(session, version_id)
    policy = await session.get_one(Policy, version.policy_id)
    deployment = await deployment_service.locked(session, policy)
    await session.refresh(version)
    if version.state != VersionState.SHADOW or deployment.version_id != serving_id:
        return False  # somebody was quicker
    version.metrics = {**version.metrics, **{f"shadow/{name}": value for name, value in verdict.figures.items()}}
    if verdict.action == "promote":
        shadow.passed(session, policy, version, actor="watch", reason=verdict.reason)
    else:
        reason = verdict.reason if verdict.reason == deployment_service.GONE_BACK else f"shadow: {verdict.reason}"
        # Silence is no word against it: the guard hears of what was shown, and of nothing else.
        alarm = settings if verdict.action == "reject" else None
        await deployment_service.reject(session, policy, version, actor="watch", reason=reason, alarm=alarm)
    log.info("%s: %s, %s", service.label(policy, version), verdict.action, verdict.reason)
    return True
