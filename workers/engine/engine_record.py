"""The engine's row in the database: which incarnation runs, and what it must load before it takes traffic."""

from collections.abc import Mapping
from pathlib import Path

from sqlalchemy import ColumnElement, case, exists, select, update

from app.core.database import Database, now
from app.core.settings import Settings
from app.engines import load_errors
from app.models import Engine, EngineState
from workers.engine.start_versions import start_versions_of
from workers.engine.version_files import VersionRef
from workers.stage_metrics import ENGINE_LOAD_CRASHES, ENGINE_STARTS, ENGINE_UP


class DatabaseEngineRecord:
    """The supervisor's EngineRecord on the database. `ready_file` exists while the engine takes traffic."""

    def __init__(self, db: Database, settings: Settings, url: str, ready_file: Path | None = None) -> None:
        self._db, self._settings, self._url, self._ready_file = db, settings, url, ready_file
        self._versions = start_versions_of(settings)

    async def record_start(self) -> int:
        """Record that the engine is starting with nothing loaded. Return its new incarnation."""
        self._remove_ready_file()
        name = self._settings.engine.name
        ENGINE_UP.labels(name).set(0)
        ENGINE_LOAD_CRASHES.labels(name)
        async with self._db.write() as session:
            engine = await session.get(Engine, name, with_for_update=True)
            if engine is None:
                engine = Engine(name=name, incarnation=0)
                session.add(engine)
            engine.url, engine.state, engine.loaded, engine.reason = self._url, EngineState.STARTING, [], None
            engine.kind = self._settings.engine.kind
            engine.weights = engine.swapping_until = None
            engine.incarnation += 1
            incarnation = engine.incarnation
        ENGINE_STARTS.labels(name).inc()
        return incarnation

    async def read_wanted_versions(self) -> list[VersionRef]:
        async with self._db.read() as session:
            return await self._versions.read_wanted(session, self._settings)

    async def try_mark_ready(self, incarnation: int, loaded: list[str], errors: Mapping[str, str]) -> bool:
        """Let the engine take traffic. Return False if a serving version is missing, or another incarnation runs.

        A serving version is missing if a deployment changed while the engine loaded. Other wanted versions may be
        missing, and so may those with an entry in `errors` that `StartVersions.may_lack` names.
        """
        async with self._db.write() as session:
            required = await self._versions.read_required(session)
            engine = await session.get_one(Engine, self._settings.engine.name, with_for_update=True)
            if engine.incarnation != incarnation:
                return False
            engine.reason = load_errors.encode(errors)
            if not required <= {*loaded, *self._versions.may_lack(errors)}:
                return False
            self._versions.record(engine, loaded)
            load_errors.forget_crashes(engine, loaded)
            engine.state, engine.heartbeat_at = EngineState.READY, now()
        if self._ready_file is not None:
            self._ready_file.touch()
        ENGINE_UP.labels(self._settings.engine.name).set(1)
        return True

    async def is_swapping_weights(self, incarnation: int) -> bool:
        async with self._db.read() as session:
            is_swapping = exists().where(*self._is_incarnation(incarnation), Engine.swapping_until > now())
            return bool(await session.scalar(select(is_swapping)))

    async def record_heartbeat(self, incarnation: int) -> None:
        """Record that the engine is ready. What it could not load stays recorded."""
        reason = case((Engine.state == EngineState.READY, Engine.reason))
        await self._set_state(incarnation, EngineState.READY, reason)

    async def record_load_crash(self, incarnation: int, ref: VersionRef) -> None:
        """Record that the engine has ended while it loaded this version."""
        ENGINE_LOAD_CRASHES.labels(self._settings.engine.name).inc()
        async with self._db.write() as session:
            engine = await session.get_one(Engine, self._settings.engine.name, with_for_update=True)
            if engine.incarnation == incarnation:
                load_errors.record_crash(engine, ref.name, ref.manifest_sha256)

    async def mark_down(self, incarnation: int, reason: str) -> None:
        self._remove_ready_file()  # first, since the database may not be reached
        ENGINE_UP.labels(self._settings.engine.name).set(0)
        await self._set_state(incarnation, EngineState.DOWN, reason)

    async def _set_state(self, incarnation: int, state: EngineState, reason: str | ColumnElement[str | None]) -> None:
        """Set the state and the heartbeat, unless another incarnation has replaced this one."""
        values = {"state": state, "reason": reason, "heartbeat_at": now()}
        async with self._db.write() as session:
            await session.execute(update(Engine).where(*self._is_incarnation(incarnation)).values(values))

    def _remove_ready_file(self) -> None:
        if self._ready_file is not None:
            self._ready_file.unlink(missing_ok=True)

    def _is_incarnation(self, incarnation: int) -> tuple[ColumnElement[bool], ...]:
        return Engine.name == self._settings.engine.name, Engine.incarnation == incarnation
