"""Bring the adapters of every ready engine up to date: load the wanted ones that it lacks, and unload the others.

It lacks what was pinned, kept or lost since it started.
"""

import asyncio
import logging
import time
from collections.abc import Sequence

from sqlalchemy import exists, or_, select
from sqlalchemy.ext.asyncio import AsyncSession

from alignment.errors import DamagedAdapter
from app.core.database import Database, now
from app.core.settings import Settings
from app.engines import fleet, inventory, load_errors
from app.inference.engine import EngineClient
from app.inference.keys import load_engine_keys
from app.inference.pool import EnginePool
from app.inference.transport import EngineRefused, EngineUnavailable
from app.models import REQUESTED, Engine, Rollout, Turn, TurnState, Version, VersionState
from workers.queue.leased_job import backoff
from workers.release.delivery.adapters import load_and_verify, prepare_adapter
from workers.release.verify_delivery import NotDelivered, Timings

log = logging.getLogger("attune.adapter_sync")
# The evaluate stage loads these, and only there may a version be rejected for what an engine answers.
LOADED_BY_EVALUATE = (VersionState.TRAINED, VersionState.VERIFIED)

MAX_SECONDS_BY_PATH = 5.0  # of one run on one engine
MAX_SECONDS_BY_VALUE = 60.0  # where adapters are sent in the request
# An adapter is unloaded so many times `route_cache_seconds` after the last chat can have been routed to it.
UNLOAD_DELAY_FACTOR = 5
LoadKey = tuple[str, int, str]  # an engine's name and incarnation, and a version's id
FAILED_LOADS: dict[LoadKey, tuple[int, float]] = {}  # failed attempts, and the monotonic time of the next one


async def sync_adapters(db: Database, settings: Settings) -> None:
    """Verify and load the wanted versions that an engine does not hold.

    Serving versions that no engine holds come first. One engine that hangs delays the others by a few seconds at most.
    """
    async with db.read() as session:
        engines = await fleet.list_ready_engines(session)
        serving = await inventory.serving_adapter_names(session)
        wanted = [
            version
            for version in await inventory.wanted_versions(session, settings.release.keep_versions)
            if version.state not in LOADED_BY_EVALUATE
        ]
    unserved = {name for name in serving if not any(name in engine.loaded for engine in engines)}
    wanted.sort(key=lambda version: version.adapter_name not in unserved)
    await _clear_outdated_errors(db, engines, {version.adapter_name or "" for version in wanted})
    missing = {
        engine.name: [
            version
            for version in wanted
            if not fleet.is_loaded(engine, version)
            and not _has_crashed(engine, version)
            and (version.adapter_name in unserved or not _is_backing_off(_load_key(engine, version)))
        ]
        for engine in engines
    }
    if not any(missing.values()):
        return
    async with EnginePool(load_engine_keys(settings)) as pool:
        await asyncio.gather(*(_load_missing(db, settings, pool, engine, missing[engine.name]) for engine in engines))


async def _load_missing(
    db: Database, settings: Settings, pool: EnginePool, engine: Engine, versions: Sequence[Version]
) -> None:
    max_seconds = MAX_SECONDS_BY_PATH if settings.engine.adapter_delivery == "path" else MAX_SECONDS_BY_VALUE
    deadline = time.monotonic() + max_seconds
    # One that has failed comes last: checking a damaged version again must not use up the time of the others.
    for version in sorted(versions, key=lambda version: FAILED_LOADS.get(_load_key(engine, version), (0, 0.0))[0]):
        client, key = pool.get(engine), _load_key(engine, version)
        try:
            async with asyncio.timeout(max(0.0, deadline - time.monotonic())):
                adapter = await prepare_adapter(version, settings, Timings())
                await load_and_verify(client, version, adapter, settings, Timings())
        except (DamagedAdapter, NotDelivered, EngineRefused, EngineUnavailable, OSError) as error:
            attempt = FAILED_LOADS.get(key, (0, 0.0))[0] + 1
            FAILED_LOADS[key] = attempt, time.monotonic() + backoff(attempt)
            message = "%s is not loaded on %s, tried again in %.0f s: %r"
            log.warning(message, version.adapter_name, engine.name, backoff(attempt), error)
            if isinstance(error, EngineUnavailable | TimeoutError):
                return  # the other versions would fail as well
            async with db.write() as session:
                await inventory.record_load_error(session, engine, version.adapter_name or "", str(error))
            continue
        FAILED_LOADS.pop(key, None)
        async with db.write() as session:
            await inventory.record_adapters(session, engine, added=version.adapter_name)


async def _clear_outdated_errors(db: Database, engines: Sequence[Engine], wanted: set[str]) -> None:
    """Remove recorded errors of versions that are no longer wanted."""
    for engine in engines:
        if outdated := load_errors.read(engine).keys() - wanted:
            async with db.write() as session:
                await inventory.clear_load_errors(session, engine, outdated)


def _has_crashed(engine: Engine, version: Version) -> bool:
    """Whether the engine has ended so often while it loaded the version that it is not loaded again."""
    count = load_errors.count_crashes(engine, version.adapter_name or "", version.manifest_sha256)
    return count >= load_errors.MAX_CRASHES


def _is_backing_off(key: LoadKey) -> bool:
    return FAILED_LOADS.get(key, (0, 0.0))[1] > time.monotonic()


def _load_key(engine: Engine, version: Version) -> LoadKey:
    return engine.name, engine.incarnation, version.id


async def unload_unused_adapters(db: Database, settings: Settings) -> None:
    """Unload the adapters that are neither wanted nor in use, one at a time, outside the publish task."""
    # A rollout that only waits in the queue does not use its version.
    is_running_rollout = exists().where(Rollout.id == Turn.id, Rollout.lease_until > now())
    async with db.read() as session:
        in_use = set(
            await session.scalars(
                select(Version.adapter_name)
                .join(Turn, Turn.version_id == Version.id)
                .where(Turn.state == TurnState.OPEN, or_(Turn.origin.in_(REQUESTED), is_running_rollout))
            )
        )
        needed = in_use | await _wanted_names(session, settings)
        engines = await fleet.list_ready_engines(session)
    async with EnginePool(load_engine_keys(settings)) as pool:
        for engine in engines:
            client = pool.get(engine)
            for name in sorted((set(engine.loaded) | await _unrecorded_adapters(db, client, engine)) - needed):
                await _unload(db, settings, client, engine, name)


async def _wanted_names(session: AsyncSession, settings: Settings) -> set[str | None]:
    return {
        version.adapter_name for version in await inventory.wanted_versions(session, settings.release.keep_versions)
    }


async def _unrecorded_adapters(db: Database, client: EngineClient, engine: Engine) -> set[str]:
    """Return versions that the engine holds unrecorded: their load finished after its time-out."""
    try:
        names = await client.list_adapters() - set(engine.loaded)
    except (EngineUnavailable, EngineRefused):
        return set()
    if not names:
        return set()
    async with db.read() as session:
        versions = await session.scalars(select(Version.adapter_name).where(Version.adapter_name.in_(names)))
        return {name for name in versions if name is not None}


async def _unload(db: Database, settings: Settings, client: EngineClient, engine: Engine, name: str) -> None:
    """Stop routing to the adapter in the transaction that finds it unwanted, wait for late requests, then unload it."""
    async with db.write() as session:
        # Locked before the check, so that no deployment can point to the adapter in between.
        current = await inventory.lock_engine(session, engine)
        if current is None or name in await _wanted_names(session, settings):
            return
        await inventory.record_adapters(session, engine, removed=name)
    await asyncio.sleep(UNLOAD_DELAY_FACTOR * settings.server.route_cache_seconds)
    try:
        await client.unload_adapter(name)
    except (EngineUnavailable, EngineRefused) as error:
        log.warning("%s could not be unloaded from %s, the next reconcile tries again: %s", name, engine.name, error)
