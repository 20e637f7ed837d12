"""The supervisor's book, on the database: which incarnation runs, what it must hold before it takes traffic."""

from pathlib import Path

from sqlalchemy import exists, select

from app.core.database import Database, now
from app.core.settings import Settings
from app.models import Engine, EngineState, Version, VersionState
from workers.engine.version_files import AdapterRef
from workers.release import engine_inventory


class DatabaseLedger:
    def __init__(self, db: Database, settings: Settings, url: str) -> None:
        self._db, self._settings, self._url = db, settings, url

    async def starting(self) -> int:
        async with self._db.write() as session:
            return await engine_inventory.starting(session, self._settings.engine_name, self._url)

    async def wanted(self) -> list[AdapterRef]:
        async with self._db.read() as session:
            if self._settings.adaptation == "full":
                return _weights(await engine_inventory.pointed(session))
            wanted = await engine_inventory.wanted(session, self._settings.keep_versions)
        versions = [version for version in wanted if version.state != VersionState.TRAINED]  # evaluate brings those
        return [
            AdapterRef(version.adapter_name, Path(version.adapter_path), version.manifest_sha256)
            for version in versions
            if version.adapter_name and version.adapter_path and version.manifest_sha256
        ]

    async def ready(self, incarnation: int, loaded: list[str]) -> bool:
        """Open for traffic, unless a version that serves is missing: the pointer moved while the engine loaded.

        Of the other wanted ones a damaged one may be missing; that is no reason to keep the door shut.
        """
        full = self._settings.adaptation == "full"
        async with self._db.write() as session:
            if not await engine_inventory.serving(session) <= set(loaded):
                return False
            if full and not {ref.name for ref in _weights(await engine_inventory.pointed(session))} <= set(loaded):
                return False
            engine = await session.get_one(Engine, self._settings.engine_name, with_for_update=True)
            if engine.incarnation != incarnation:
                return False
            if full:  # none were loaded: those that it was started with
                engine.weights = loaded[-1] if loaded else None
            else:
                engine.loaded = sorted(loaded)
            await session.flush()
            return await engine_inventory.set_state(session, engine.name, incarnation, EngineState.READY)

    async def moving(self, incarnation: int) -> bool:
        async with self._db.read() as session:
            mine = Engine.name == self._settings.engine_name, Engine.incarnation == incarnation
            return bool(await session.scalar(select(exists().where(*mine, Engine.swapping_until > now()))))

    async def beat(self, incarnation: int) -> None:
        async with self._db.write() as session:
            await engine_inventory.set_state(session, self._settings.engine_name, incarnation, EngineState.READY)

    async def down(self, incarnation: int, reason: str) -> None:
        async with self._db.write() as session:
            await engine_inventory.set_state(session, self._settings.engine_name, incarnation, EngineState.DOWN, reason)


def _weights(version: Version) -> list[AdapterRef]:
    """None for the base model's, which an engine starts with."""
    if not (version.weights and version.adapter_path and version.manifest_sha256):
        return []
    return [AdapterRef(version.weights, Path(version.adapter_path), version.manifest_sha256, full=True)]
