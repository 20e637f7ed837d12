"""Whatever was left lying → picked up again. Lose every message and this still finishes the work."""

import logging

from sqlalchemy import ColumnElement, exists, func, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from app.config import Settings
from app.db import Database, now
from app.engine.client import EngineClient
from app.engine.errors import EngineRefused, EngineUnavailable
from app.engine.keys import engine_keys
from app.engine.pool import EnginePool
from app.jobs import Station, nudge
from app.models import (
    LOST_FLAW,
    SERVER_LOST,
    Batch,
    BatchState,
    Engine,
    EngineState,
    Feedback,
    Sample,
    SampleState,
    Turn,
    TurnState,
    Version,
    VersionState,
)
from app.models.lease import free
from app.policies import service
from workers import batches, ledger

log = logging.getLogger("attune.sweep")


async def sweep(db: Database, settings: Settings) -> None:
    await batches.quarantine_poisoned(db, settings)
    async with db.write() as session:
        await _close_lost_turns(session, settings)
        await _mark_silent_engines(session, settings)
        nudge(session, *await _waiting(session, settings))
    await retire(db, settings)


async def _waiting(session: AsyncSession, settings: Settings) -> list[Station]:
    """The stations that have work and might not have heard of it."""
    work: dict[Station, ColumnElement[bool]] = {
        "curate": exists().where(Feedback.curated.is_(False)),
        "assemble": (
            select(func.count()).select_from(Sample).where(Sample.state == SampleState.OPEN).scalar_subquery()
            >= settings.batch_size
        ),
        "train": exists().where(Batch.state == BatchState.OPEN, free(Batch)),
        "evaluate": exists().where(Version.state == VersionState.TRAINED, free(Version)),
        "publish": exists().where(Version.state == VersionState.PROVEN, free(Version)),
    }
    found = (await session.execute(select(*[condition.label(name) for name, condition in work.items()]))).one()
    return [station for station, waits in zip(work, found, strict=True) if waits]


async def _close_lost_turns(session: AsyncSession, settings: Settings) -> None:
    """Turns whose process died mid-reply: nobody will ever finish them, and feedback on them waits."""
    await session.execute(
        update(Turn)
        .where(Turn.state == TurnState.OPEN, Turn.created_at < now() - 1.5 * settings.chat_timeout_seconds)
        .values(
            state=TurnState.ABORTED,
            finish_reason=SERVER_LOST,
            flaw=func.coalesce(Turn.flaw, LOST_FLAW),
            finished_at=now(),
        )
        .execution_options(synchronize_session=False)
    )


async def _mark_silent_engines(session: AsyncSession, settings: Settings) -> None:
    await session.execute(
        update(Engine)
        .where(Engine.state == EngineState.READY, Engine.heartbeat_at < now() - 3 * settings.lease_seconds)
        .values(state=EngineState.DOWN, reason="its supervisor fell silent")
        .execution_options(synchronize_session=False)
    )


async def retire(db: Database, settings: Settings) -> None:
    """Unload, one at a time and off the publish path, what nobody may ask for any more."""
    async with db.read() as session:
        busy = set(
            await session.scalars(
                select(Version.adapter_name)
                .join(Turn, Turn.version_id == Version.id)
                .where(Turn.state == TurnState.OPEN)
            )
        )
        engines = await service.ready_engines(session)
    pool = EnginePool(engine_keys(settings))
    try:
        for engine in engines:
            for name in sorted(set(engine.loaded) - busy):
                await _retire(db, settings, pool.at(engine.url), engine, name)
    finally:
        await pool.close()


async def _retire(db: Database, settings: Settings, client: EngineClient, engine: Engine, name: str) -> None:
    """First nobody is routed there, in the transaction that finds it unwanted; then it goes."""
    async with db.write() as session:
        wanted = {version.adapter_name for version in await ledger.wanted(session, settings.keep_versions)}
        if name in wanted or not await ledger.note(session, engine, removed=name):
            return
    try:
        await client.unload_adapter(name)
    except (EngineUnavailable, EngineRefused) as error:
        log.warning("%s could not be unloaded from %s, the next sweep tries again: %s", name, engine.name, error)
        async with db.write() as session:
            await ledger.note(session, engine, added=name)
