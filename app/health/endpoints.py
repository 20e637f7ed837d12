"""/livez needs nothing; /readyz needs the database and an engine that holds what serves."""

from typing import Any

from fastapi import APIRouter
from sqlalchemy import select

from app.auth import DatabaseDep
from app.errors import DOCUMENTED, Unavailable
from app.models import Deployment, Version
from app.policies import service

router = APIRouter(tags=["health"], responses=DOCUMENTED)


@router.get("/livez")
async def livez() -> dict[str, str]:
    return {"status": "alive"}


@router.get("/readyz")
async def readyz(db: DatabaseDep) -> dict[str, Any]:
    async with db.read() as session:
        engines = await service.ready_engines(session)
        serving = list(await session.scalars(select(Version).join(Deployment, Deployment.version_id == Version.id)))
    if not engines or not all(any(service.holds(engine, version) for engine in engines) for version in serving):
        raise Unavailable("No ready engine holds what serves." if engines else "No engine is ready.")
    return {"status": "ready", "engines": [engine.name for engine in engines]}
