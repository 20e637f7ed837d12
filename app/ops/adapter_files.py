"""/v1/engines/versions: the files that an engine's host downloads when it starts.

The caller is not a tenant: it presents the engines' admin key.
"""

import secrets
from pathlib import Path
from typing import Annotated

import anyio
from fastapi import APIRouter, Request
from fastapi import Path as InPath
from sqlalchemy import select
from starlette.responses import FileResponse

from alignment.artifacts.manifest import MANIFEST
from alignment.artifacts.specs import ADAPTER, ADAPTER_CONFIG
from app.core.errors import NotFound, Unauthorized
from app.core.http import services_of
from app.inference.keys import EngineKeys
from app.models import Version
from app.projects.auth import DatabaseDep, bearer

router = APIRouter(prefix="/v1/engines", include_in_schema=False)
FILES = (MANIFEST, ADAPTER_CONFIG, ADAPTER)  # not the optimizer's state


@router.get("/versions/{name}/files/{file}")
async def get_file(
    request: Request, db: DatabaseDep, name: Annotated[str, InPath(max_length=80)], file: str
) -> FileResponse:
    admin_key = services_of(request).get(EngineKeys).admin
    if not secrets.compare_digest(bearer(request).encode(), admin_key.encode()):
        raise Unauthorized("Send the engines' admin key as 'Authorization: Bearer …'.")
    async with db.read() as session:
        folder = await session.scalar(
            select(Version.adapter_path).where(Version.adapter_name == name, Version.adapter.is_not(None))
        )
    path = Path(folder) / file if folder is not None and file in FILES else None
    if path is None or not await anyio.Path(path).is_file():  # in a thread: the storage may hang
        raise NotFound(f"There is no file '{file}' of a version '{name}'.")
    return FileResponse(path, media_type="application/octet-stream")
