"""The engine's row in the database: which incarnation runs, and what it must load before it takes traffic."""

from pathlib import Path

from sqlalchemy import exists, select

from app.core.database import Database, now
from app.core.settings import Settings
from app.models import Engine, EngineState, Version, VersionState
from workers.engine.version_files import VersionRef
from workers.release import engine_inventory


class DatabaseEngineRecord:
    """The supervisor's EngineRecord on the database."""

    def __init__(self, db: Database, settings: Settings, url: str) -> None:
        self._db, self._settings, self._url = db, settings, url

    async def record_start(self) -> int:
        async with self._db.write() as session:
            return await engine_inventory.record_start(session, self._settings.engine_name, self._url)

    async def read_wanted_versions(self) -> list[VersionRef]:
        async with self._db.read() as session:
            if self._settings.adaptation == "full":
                return _weights_refs(await engine_inventory.serving_version(session))
            wanted = await engine_inventory.wanted_versions(session, self._settings.keep_versions)
        versions = [version for version in wanted if version.state != VersionState.TRAINED]  # evaluate loads those
        return [
            VersionRef(version.adapter_name, Path(version.adapter_path), version.manifest_sha256)
            for version in versions
            if version.adapter_name and version.adapter_path and version.manifest_sha256
        ]

    async def try_mark_ready(self, incarnation: int, loaded: list[str]) -> bool:
        """Let the engine take traffic. Return False if a serving version is missing, or another incarnation runs.

        A serving version is missing if a deployment changed while the engine loaded. Other wanted versions may be
        missing: one of them may be damaged, and that must not keep the engine down.
        """
        is_full = self._settings.adaptation == "full"
        async with self._db.write() as session:
            if not await engine_inventory.serving_adapter_names(session) <= set(loaded):
                return False
            if is_full:
                serving = _weights_refs(await engine_inventory.serving_version(session))
                if not {ref.name for ref in serving} <= set(loaded):
                    return False
            engine = await session.get_one(Engine, self._settings.engine_name, with_for_update=True)
            if engine.incarnation != incarnation:
                return False
            if is_full:  # if none were loaded, the engine has the base model's weights
                engine.weights = loaded[-1] if loaded else None
            else:
                engine.loaded = sorted(loaded)
            await session.flush()
            return await engine_inventory.set_state(session, engine.name, incarnation, EngineState.READY)

    async def is_swapping_weights(self, incarnation: int) -> bool:
        async with self._db.read() as session:
            is_this_engine = Engine.name == self._settings.engine_name, Engine.incarnation == incarnation
            return bool(await session.scalar(select(exists().where(*is_this_engine, Engine.swapping_until > now()))))

    async def record_heartbeat(self, incarnation: int) -> None:
        async with self._db.write() as session:
            await engine_inventory.set_state(session, self._settings.engine_name, incarnation, EngineState.READY)

    async def mark_down(self, incarnation: int, reason: str) -> None:
        async with self._db.write() as session:
            await engine_inventory.set_state(session, self._settings.engine_name, incarnation, EngineState.DOWN, reason)


def _weights_refs(version: Version) -> list[VersionRef]:
    """Return the version's weights to load: none for the base model, whose weights an engine starts with."""
    if not (version.weights and version.adapter_path and version.manifest_sha256):
        return []
    return [VersionRef(version.weights, Path(version.adapter_path), version.manifest_sha256, full_weights=True)]
