"""Wanted versions → held by every ready engine: what was pinned, kept or lost since the engine started."""

import asyncio
import logging
import time
from collections.abc import Sequence

from alignment.errors import DamagedAdapter
from app.core.database import Database
from app.core.settings import Settings
from app.inference.errors import EngineRefused, EngineUnavailable
from app.inference.keys import engine_keys
from app.inference.pool import EnginePool
from app.models import Engine, Version, VersionState
from app.policies import service
from workers.queue.retry import pause
from workers.release import engine_inventory
from workers.release.verify_delivery import NotDelivered, Timings, prove, ready_to_load

log = logging.getLogger("attune.fleet")
# Evaluate brings these, and only there may a version be rejected for what an engine says of it.
ON_THEIR_WAY = (VersionState.TRAINED, VersionState.VERIFIED)

MOST_SECONDS = 5.0  # of one run on one engine,
MOST_SECONDS_OF_BYTES = 60.0  # where adapters are sent whole
Place = tuple[str, int, str]  # an engine's name and incarnation, and a version's id
RESTING: dict[Place, tuple[int, float]] = {}  # what failed there: how often, and until when it is left alone


async def sync_adapters(db: Database, settings: Settings) -> None:
    """Prove and load, off the publish path, what an engine should hold and does not: what serves and nobody holds
    before all else. One that hangs holds the others up for a few seconds at most."""
    async with db.read() as session:
        engines = await service.ready_engines(session)
        serving = await engine_inventory.serving(session)
        wanted = [
            version
            for version in await engine_inventory.wanted(session, settings.keep_versions)
            if version.state not in ON_THEIR_WAY
        ]
    nobodys = {name for name in serving if not any(name in engine.loaded for engine in engines)}
    wanted.sort(key=lambda version: version.adapter_name not in nobodys)
    missing = {
        engine.name: [
            version
            for version in wanted
            if not service.holds(engine, version)
            and (version.adapter_name in nobodys or not _rests(_place(engine, version)))
        ]
        for engine in engines
    }
    if not any(missing.values()):
        return
    pool = EnginePool(engine_keys(settings))
    try:
        await asyncio.gather(*(_furnish(db, settings, pool, engine, missing[engine.name]) for engine in engines))
    finally:
        await pool.close()


async def _furnish(
    db: Database, settings: Settings, pool: EnginePool, engine: Engine, versions: Sequence[Version]
) -> None:
    until = time.monotonic() + (MOST_SECONDS if settings.adapter_delivery == "path" else MOST_SECONDS_OF_BYTES)
    for version in versions:
        client, place = pool.at(engine.url), _place(engine, version)
        try:
            async with asyncio.timeout(max(0.0, until - time.monotonic())):
                adapter = await ready_to_load(version, settings, Timings())
                await prove(client, version, adapter, settings, Timings())
        except (DamagedAdapter, NotDelivered, EngineRefused, EngineUnavailable, OSError) as error:
            attempt = RESTING.get(place, (0, 0.0))[0] + 1
            RESTING[place] = attempt, time.monotonic() + pause(attempt)
            told = "%s is not loaded on %s, tried again in %.0f s: %r"
            log.warning(told, version.adapter_name, engine.name, pause(attempt), error)
            if isinstance(error, EngineUnavailable | TimeoutError):
                return  # it would fare no better with the others
            continue
        RESTING.pop(place, None)
        async with db.write() as session:
            await engine_inventory.note(session, engine, added=version.adapter_name)


def _rests(place: Place) -> bool:
    return RESTING.get(place, (0, 0.0))[1] > time.monotonic()


def _place(engine: Engine, version: Version) -> Place:
    return engine.name, engine.incarnation, version.id
