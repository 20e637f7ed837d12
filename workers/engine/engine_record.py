"""The engine's row in the database: which incarnation runs, and what it must load before it takes traffic."""

from pathlib import Path

from sqlalchemy import ColumnElement, exists, select, update

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
        """Record that the engine is starting with nothing loaded. Return its new incarnation."""
        name = self._settings.engine_name
        async with self._db.write() as session:
            engine = await session.get(Engine, name, with_for_update=True)
            if engine is None:
                engine = Engine(name=name, incarnation=0)
                session.add(engine)
            engine.url, engine.state, engine.loaded, engine.reason = self._url, EngineState.STARTING, [], None
            engine.weights = engine.swapping_until = None
            engine.incarnation += 1
            return engine.incarnation

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
            required = await engine_inventory.serving_adapter_names(session)
            if is_full:
                required |= {ref.name for ref in _weights_refs(await engine_inventory.serving_version(session))}
            if not required <= set(loaded):
                return False
            engine = await session.get_one(Engine, self._settings.engine_name, with_for_update=True)
            if engine.incarnation != incarnation:
                return False
            if is_full:  # if none were loaded, the engine has the base model's weights
                engine.weights = loaded[-1] if loaded else None
            else:
                engine.loaded = sorted(loaded)
            engine.state, engine.reason, engine.heartbeat_at = EngineState.READY, None, now()
            return True

    async def is_swapping_weights(self, incarnation: int) -> bool:
        async with self._db.read() as session:
            is_swapping = exists().where(*self._is_incarnation(incarnation), Engine.swapping_until > now())
            return bool(await session.scalar(select(is_swapping)))

    async def record_heartbeat(self, incarnation: int) -> None:
        await self._set_state(incarnation, EngineState.READY)

    async def mark_down(self, incarnation: int, reason: str) -> None:
        await self._set_state(incarnation, EngineState.DOWN, reason)

    async def _set_state(self, incarnation: int, state: EngineState, reason: str | None = None) -> None:
        """Set the state and the heartbeat, unless another incarnation has replaced this one."""
        values = {"state": state, "reason": reason, "heartbeat_at": now()}
        async with self._db.write() as session:
            await session.execute(update(Engine).where(*self._is_incarnation(incarnation)).values(values))

    def _is_incarnation(self, incarnation: int) -> tuple[ColumnElement[bool], ...]:
        return Engine.name == self._settings.engine_name, Engine.incarnation == incarnation


def _weights_refs(version: Version) -> list[VersionRef]:
    """Return the version's weights to load: none for the base model, whose weights an engine starts with."""
    if not (version.weights and version.adapter_path and version.manifest_sha256):
        return []
    return [VersionRef(version.weights, Path(version.adapter_path), version.manifest_sha256, full_weights=True)]
