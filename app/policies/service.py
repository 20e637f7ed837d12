"""Policies by name, the versions that may be asked for, and the engines that hold them."""

from collections.abc import Sequence

from sqlalchemy import exists, or_, select
from sqlalchemy.ext.asyncio import AsyncSession

from app.core.errors import Conflict, NotFound
from app.core.leases import lease_is_free
from app.core.settings import Settings
from app.models import SERVED_TRAFFIC, Engine, EngineState, Policy, Version, VersionState
from app.policies import repository


async def named(session: AsyncSession, project_id: str, name: str) -> Policy:
    policy = await repository.policy_named(session, project_id, name)
    if policy is None:
        raise NotFound(f"There is no policy named '{name}'.", code="model_not_found", param="model")
    return policy


async def askable(session: AsyncSession, project_id: str) -> list[tuple[Policy, Version]]:
    """Versions that people have heard and that a ready engine holds: what `policy@vN` may name now."""
    rows = await session.execute(
        select(Policy, Version)
        .join(Version, Version.policy_id == Policy.id)
        .where(Policy.project_id == project_id, Version.state.in_(SERVED_TRAFFIC))
        .order_by(Policy.name, Version.number)
    )
    engines = await ready_engines(session)
    return [(policy, version) for policy, version in rows if any(holds(e, version) for e in engines)]


def label(policy: Policy, version: Version) -> str:
    """Example: "assistant@v12"."""
    return f"{policy.name}@v{version.number}"


def holds(engine: Engine, version: Version) -> bool:
    """Its own weights are the version's and stay so, and it has the adapter, if the version is one."""
    if engine.swapping_until is not None or engine.weights != version.weights:
        return False
    return version.adapter is None or version.adapter in engine.loaded


def enough(holders: Sequence[Engine], engines: Sequence[Engine]) -> bool:
    """Whether so many of the ready engines may answer alone: half of them, and one at least. A replica that is slow or
    hangs must not hold the others up; requests go to those that hold what they ask for."""
    return bool(holders) and 2 * len(holders) >= len(engines)


async def proving(session: AsyncSession, engine: Engine) -> bool:
    """Its own weights are a version's that is about to go live, or about to be found unfit."""
    coming = or_(
        Version.state == VersionState.VERIFIED, (Version.state == VersionState.TRAINED) & ~lease_is_free(Version)
    )
    asked = select(exists().where(Version.adapter_name == engine.weights, Version.full_weights, coming))
    return engine.swapping_until is None and bool(await session.scalar(asked))


def carried(version: Version, engines: Sequence[Engine]) -> bool:
    """Whether enough of these engines hold it."""
    return enough([engine for engine in engines if holds(engine, version)], engines)


def refuse_beside(settings: Settings, what: str) -> None:
    """Raises Conflict where an engine has one version's weights at a time."""
    if settings.adaptation == "full":
        told = f"{what} needs several versions side by side; of full weights an engine has one at a time."
        raise Conflict(told, code="full_weights")


async def ready_engines(session: AsyncSession, *, lock: bool = False) -> list[Engine]:
    """`lock`: what they hold stays as it is until the transaction ends."""
    rows = select(Engine).where(Engine.state == EngineState.READY).order_by(Engine.name)
    if lock:
        rows = rows.with_for_update(read=True).execution_options(populate_existing=True)
    return list(await session.scalars(rows))
