"""The fleet: which engines are ready, and which of them can serve a version."""

from collections.abc import Collection, Sequence
from typing import Protocol

from sqlalchemy import exists, or_, select
from sqlalchemy.ext.asyncio import AsyncSession

from app.core.leases import lease_is_free
from app.models import Engine, EngineState, Version, VersionState


class LoadedEngine(Protocol):
    """What an engine has loaded, as its row says."""

    @property
    def swapping_until(self) -> float | None: ...

    @property
    def weights(self) -> str | None: ...

    @property
    def loaded(self) -> Collection[str]: ...


class LoadableVersion(Protocol):
    """What an engine must have loaded to serve a version. See `Version`."""

    @property
    def adapter(self) -> str | None: ...

    @property
    def weights(self) -> str | None: ...


async def list_ready_engines(session: AsyncSession, *, lock: bool = False) -> list[Engine]:
    """Return the ready engines, by name. With `lock`, their rows stay as they are until the transaction ends."""
    query = select(Engine).where(Engine.state == EngineState.READY).order_by(Engine.name)
    if lock:
        query = query.with_for_update(read=True).execution_options(populate_existing=True)
    return list(await session.scalars(query))


def is_loaded(engine: LoadedEngine, version: LoadableVersion) -> bool:
    """Whether the engine can serve the version.

    The engine's own weights are the version's base or full weights, no weight swap is under way, and the engine has
    loaded the version's adapter, if the version is one.
    """
    if engine.swapping_until is not None or engine.weights != version.weights:
        return False
    return version.adapter is None or version.adapter in engine.loaded


def has_quorum(holders: Sequence[Engine], engines: Sequence[Engine]) -> bool:
    """Whether `holders` are at least half of the ready `engines`, and at least one.

    A replica that is slow or hangs must not delay the others: requests go to the engines that have the version.
    """
    return bool(holders) and 2 * len(holders) >= len(engines)


def is_loaded_on_quorum(version: LoadableVersion, engines: Sequence[Engine]) -> bool:
    """Whether enough of these engines have loaded the version for it to serve."""
    return has_quorum([engine for engine in engines if is_loaded(engine, version)], engines)


async def is_verifying(session: AsyncSession, engine: Engine) -> bool:
    """Whether the engine holds full weights that are being verified, or that are verified and about to go live."""
    pending = or_(
        Version.state == VersionState.VERIFIED, (Version.state == VersionState.TRAINED) & ~lease_is_free(Version)
    )
    query = select(exists().where(Version.weights == engine.weights, pending))
    return engine.swapping_until is None and bool(await session.scalar(query))
