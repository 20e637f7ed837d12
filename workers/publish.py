"""Proven version → live: every ready engine holds it, then one transaction moves the pointer."""

import time

from sqlalchemy import select

from app.config import Settings
from app.db import Database
from app.jobs import nudge
from app.models import Policy, Version, VersionState, lease, record
from app.policies import service


async def publish(db: Database, settings: Settings, owner: str) -> int:
    """Publish every proven version. Returns how many went live."""
    async with db.read() as session:
        proven = list(
            await session.scalars(
                select(Version.id).where(Version.state == VersionState.PROVEN).order_by(Version.number)
            )
        )
    return sum([await _publish(db, settings, owner, version_id) for version_id in proven])


async def _publish(db: Database, settings: Settings, owner: str, version_id: str) -> bool:
    started = time.perf_counter()
    async with db.write() as session:
        fence = await lease.claim(
            session,
            Version,
            version_id,
            owner=owner,
            seconds=settings.lease_seconds,
            states=(VersionState.PROVEN,),
        )
        if fence is None:
            return False
        version = await session.get_one(Version, version_id, populate_existing=True)
        policy = await session.get_one(Policy, version.policy_id, with_for_update=True)
        engines = await service.ready_engines(session)
        version.lease_owner = version.lease_until = None
        if policy.head_version_id != version.id:
            version.state = VersionState.REJECTED
            version.reason = "learning went back to another version before this one was published"
            label = service.label(policy, version)
            record(session, "publish", "version rejected", label, version.reason, project_id=policy.project_id)
            return False
        if not engines:
            return False
        if not all(service.holds(engine, version) for engine in engines):
            version.state = VersionState.TRAINED  # an engine came back without it: prove it there first
            nudge(session, "evaluate")
            return False
        await service.point_to(session, policy, version, actor="publish", reason="proven on every engine")
        nudge(session, "sweep", "assemble")
    switched = time.perf_counter() - started
    async with db.write() as session:  # apart from the move, so that what is timed has happened
        version = await session.get_one(Version, version_id)
        assert version.live_at is not None
        served = version.live_at - version.created_at + version.timings["export"]
        version.timings = {**version.timings, "switch": switched, "trained_to_served": served}
    return True
