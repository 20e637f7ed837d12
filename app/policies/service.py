"""Which version answers, and the one gesture that changes it: moving the pointer."""

from sqlalchemy import select, update
from sqlalchemy.ext.asyncio import AsyncSession

from app.db import now
from app.errors import Conflict, NotFound
from app.models import Deployment, Engine, EngineState, Policy, Version, VersionState, record
from app.policies import repository


async def named(session: AsyncSession, project_id: str, name: str) -> Policy:
    policy = await repository.policy_named(session, project_id, name)
    if policy is None:
        raise NotFound(f"There is no policy named '{name}'.", code="model_not_found", param="model")
    return policy


async def askable(session: AsyncSession, project_id: str) -> list[tuple[Policy, Version]]:
    """Versions that served and that every ready engine holds: what `policy@vN` may name now."""
    served = (VersionState.LIVE, VersionState.SUPERSEDED, VersionState.ROLLED_BACK)
    rows = await session.execute(
        select(Policy, Version)
        .join(Version, Version.policy_id == Policy.id)
        .where(Policy.project_id == project_id, Version.state.in_(served))
        .order_by(Policy.name, Version.number)
    )
    engines = await ready_engines(session)
    return [(policy, version) for policy, version in rows if engines and all(holds(e, version) for e in engines)]


def label(policy: Policy, version: Version) -> str:
    """Example: "assistant@v12"."""
    return f"{policy.name}@v{version.number}"


def holds(engine: Engine, version: Version) -> bool:
    return version.adapter_name is None or version.adapter_name in engine.loaded


async def ready_engines(session: AsyncSession) -> list[Engine]:
    return list(await session.scalars(select(Engine).where(Engine.state == EngineState.READY).order_by(Engine.name)))


async def point_to(session: AsyncSession, policy: Policy, version: Version, *, actor: str, reason: str) -> None:
    """Publish: new turns take `version` from the moment this transaction commits; running turns end on theirs."""
    deployment = await repository.deployment_of(session, policy.id)
    old = await repository.version(session, deployment.version_id)
    old.state = VersionState.SUPERSEDED
    version.state = VersionState.LIVE
    version.live_at = now()
    await _move(session, deployment, version)
    record(session, actor, "deploy", label(policy, version), reason, project_id=policy.project_id, previous=old.number)


async def roll_back(
    session: AsyncSession, policy: Policy, number: int | None, *, actor: str, reason: str | None
) -> tuple[Version, Version]:
    """Point back to an older version and let learning go on from there. Returns (left, taken).

    With a number it is idempotent; without one it goes back one step each time. No engine reloads anything: a version
    that a ready engine does not hold is a 409. With no engine ready the pointer moves all the same: an engine takes
    traffic only when it holds what serves.
    """
    await session.get(Policy, policy.id, with_for_update=True)  # publish takes the same lock: one move at a time
    deployment = await session.get_one(Deployment, policy.id, populate_existing=True)
    left = await repository.version(session, deployment.version_id)
    if number is None:
        if left.parent_id is None:
            raise Conflict(f"{label(policy, left)} is the first version; there is nothing to go back to.")
        target = await repository.version(session, left.parent_id)
    else:
        wanted = await repository.version_numbered(session, policy.id, number)
        if wanted is None or wanted.state in (
            VersionState.REJECTED,
            VersionState.TRAINED,
            VersionState.PROVEN,
        ):
            raise NotFound(f"Policy '{policy.name}' has never served a version v{number}.", code="model_not_found")
        target = wanted
    if target.id == left.id:
        return left, target
    engines = await ready_engines(session)
    if not all(holds(engine, target) for engine in engines):
        raise Conflict(f"{label(policy, target)} is not loaded on every ready engine.", code="version_not_loaded")
    left.state = VersionState.ROLLED_BACK
    left.reason = reason
    target.state = VersionState.LIVE
    policy.head_version_id = target.id
    await _move(session, deployment, target)
    record(session, actor, "rollback", label(policy, target), reason, project_id=policy.project_id, left=left.number)
    return left, target


async def _move(session: AsyncSession, deployment: Deployment, version: Version) -> None:
    await session.flush()
    await session.execute(
        update(Deployment)
        .where(Deployment.policy_id == deployment.policy_id)
        .values(
            version_id=version.id,
            previous_version_id=Deployment.version_id,
            epoch=Deployment.epoch + 1,
            moved_at=now(),
        )
        .execution_options(synchronize_session=False)
    )
    session.expire(deployment)
