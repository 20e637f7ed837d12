"""/livez needs nothing; /readyz needs the database and an engine that holds what serves."""

from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Request
from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncSession

from app.core.database import database_time
from app.core.errors import DOCUMENTED, Unavailable
from app.core.services import settings_of
from app.models import Deployment, Engine, Version
from app.policies import service
from app.projects.auth import DatabaseDep

router = APIRouter(tags=["health"], responses=DOCUMENTED)


@router.get("/livez")
async def livez() -> dict[str, str]:
    return {"status": "alive"}


@router.get("/readyz")
async def readyz(request: Request, db: DatabaseDep) -> dict[str, Any]:
    settings = settings_of(request)
    async with db.read() as session:
        engines = await service.ready_engines(session)
        serving = list(await session.scalars(select(Version).join(Deployment, Deployment.version_id == Version.id)))
        held = all(any(service.holds(engine, version) for engine in engines) for version in serving)
        if not held and settings.adaptation == "full":
            held = await _exchanging(session, engines, settings.lease_seconds)
    if not engines or not held:
        raise Unavailable("No ready engine holds what serves." if engines else "No engine is ready.")
    return {"status": "ready", "engines": [engine.name for engine in engines]}


async def _exchanging(session: AsyncSession, engines: Sequence[Engine], seconds: float) -> bool:
    """Whether requests wait for weights that are on their way to an engine, and not for ones that cannot come: the
    pointer moved just now, or one is being exchanged or proves what it got."""
    at = await database_time(session)
    changed_at = await session.scalar(select(func.max(Deployment.changed_at)))
    if changed_at is not None and at - changed_at < seconds:
        return True
    moving = any(engine.swapping_until is not None and engine.swapping_until > at for engine in engines)
    return moving or any([await service.proving(session, engine) for engine in engines])
