"""/livez checks nothing; /readyz checks the database and that an engine has loaded each serving version."""

from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Request
from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncSession

from app.core.database import database_time
from app.core.errors import ERROR_RESPONSES, Unavailable
from app.core.services import settings_of
from app.models import Deployment, Engine, Version
from app.policies import service
from app.projects.auth import DatabaseDep

router = APIRouter(tags=["health"], responses=ERROR_RESPONSES)


@router.get("/livez")
async def livez() -> dict[str, str]:
    return {"status": "alive"}


@router.get("/readyz")
async def readyz(request: Request, db: DatabaseDep) -> dict[str, Any]:
    settings = settings_of(request)
    async with db.read() as session:
        engines = await service.list_ready_engines(session)
        serving = list(await session.scalars(select(Version).join(Deployment, Deployment.version_id == Version.id)))
        loaded = all(any(service.is_loaded(engine, version) for engine in engines) for version in serving)
        if not loaded and settings.adaptation == "full":
            loaded = await _is_swapping(session, engines, settings.lease_seconds)
    if not engines or not loaded:
        raise Unavailable("No ready engine holds what serves." if engines else "No engine is ready.")
    return {"status": "ready", "engines": [engine.name for engine in engines]}


async def _is_swapping(session: AsyncSession, engines: Sequence[Engine], seconds: float) -> bool:
    """Return whether requests wait for full weights that an engine is about to serve.

    That is so when the deployment has changed a moment ago, or an engine swaps its weights or verifies them.
    """
    time = await database_time(session)
    changed_at = await session.scalar(select(func.max(Deployment.changed_at)))
    if changed_at is not None and time - changed_at < seconds:
        return True
    swapping = any(engine.swapping_until is not None and engine.swapping_until > time for engine in engines)
    return swapping or any([await service.is_verifying(session, engine) for engine in engines])
