"""/v1/status, /livez and /readyz.

/livez checks nothing; /readyz checks the database and that an engine has loaded each serving version, apart from
those that no engine can load.
"""

from typing import Any

from fastapi import APIRouter, Request

from app.core.draining_server import is_draining
from app.core.errors import ERROR_RESPONSES, Unavailable
from app.core.http import settings_of
from app.ops.status import read_readiness, read_status
from app.projects.auth import DatabaseDep, ViewingCaller

router = APIRouter(responses=ERROR_RESPONSES)


@router.get("/v1/status", tags=["status"])
async def status(caller: ViewingCaller, db: DatabaseDep) -> dict[str, Any]:
    async with db.read() as session:
        return await read_status(session, caller.project_id)


@router.head("/livez", include_in_schema=False)
@router.get("/livez", tags=["health"])
async def livez() -> dict[str, str]:
    return {"status": "alive"}


@router.head("/readyz", include_in_schema=False)
@router.get("/readyz", tags=["health"])
async def readyz(request: Request, db: DatabaseDep) -> dict[str, object]:
    if is_draining(request.scope):
        raise Unavailable("This process is stopping.")
    async with db.read() as session:
        return await read_readiness(session, settings_of(request))
