"""/v1/keys and /v1/project, for the admins of the project."""

from typing import Annotated

from fastapi import APIRouter, Depends, Path, Query, Request

from app.core.errors import ERROR_RESPONSES
from app.core.http import json_body
from app.core.services import services_of
from app.projects import repository, service
from app.projects.auth import AdminCaller, ApiKeyCache, DatabaseDep
from app.projects.schemas import KeyList, KeyRequest, KeyView, NewKeyView, ProjectRequest, ProjectView

router = APIRouter(prefix="/v1", tags=["projects"], responses=ERROR_RESPONSES)
KeyId = Annotated[str, Path(min_length=1, max_length=255)]


def api_key_cache(request: Request) -> ApiKeyCache:
    return services_of(request).get(ApiKeyCache)


KeyCacheDep = Annotated[ApiKeyCache, Depends(api_key_cache)]


@router.post("/keys", status_code=201)
async def create_key(
    caller: AdminCaller, db: DatabaseDep, body: Annotated[KeyRequest, json_body(KeyRequest)]
) -> NewKeyView:
    async with db.write() as session:
        row, key = await service.create_key(session, caller.project_id, body, actor=caller.key_prefix)
    return NewKeyView(**KeyView.of(row).model_dump(), key=key)


@router.get("/keys")
async def list_keys(
    caller: AdminCaller,
    db: DatabaseDep,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    after: Annotated[str | None, Query(min_length=1, max_length=255)] = None,
) -> KeyList:
    async with db.read() as session:
        last = await service.get_key(session, caller.project_id, after, param="after") if after else None
        rows = await repository.list_keys(session, caller.project_id, last, limit)
    return KeyList.of(rows, limit)


@router.get("/keys/{key_id}")
async def get_key(key_id: KeyId, caller: AdminCaller, db: DatabaseDep) -> KeyView:
    async with db.read() as session:
        return KeyView.of(await service.get_key(session, caller.project_id, key_id))


@router.delete("/keys/{key_id}")
async def revoke_key(key_id: KeyId, caller: AdminCaller, db: DatabaseDep, key_cache: KeyCacheDep) -> KeyView:
    async with db.write() as session:
        row = await service.revoke_key(session, caller.project_id, key_id, actor=caller.key_prefix)
    key_cache.forget()
    return KeyView.of(row)


@router.get("/project")
async def get_project(caller: AdminCaller, db: DatabaseDep) -> ProjectView:
    async with db.read() as session:
        return ProjectView.of(await repository.get_project(session, caller.project_id))


@router.patch("/project")
async def change_project(
    caller: AdminCaller,
    db: DatabaseDep,
    body: Annotated[ProjectRequest, json_body(ProjectRequest)],
    key_cache: KeyCacheDep,
) -> ProjectView:
    async with db.write() as session:
        project = await service.set_consent(session, caller.project_id, body.train, actor=caller.key_prefix)
    key_cache.forget()
    return ProjectView.of(project)
