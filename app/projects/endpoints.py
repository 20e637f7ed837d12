"""/v1/keys and /v1/project: a project's own admins, and nobody else's."""

from typing import Annotated

from fastapi import APIRouter, Depends, Path, Query, Request

from app.core.errors import DOCUMENTED
from app.core.http import JsonBody, parse_body, request_body_schema
from app.core.services import services_of
from app.projects import repository, service
from app.projects.auth import AdminCaller, ApiKeyCache, DatabaseDep
from app.projects.schemas import KeyList, KeyRequest, KeyView, NewKeyView, ProjectRequest, ProjectView

router = APIRouter(prefix="/v1", tags=["projects"], responses=DOCUMENTED)
KeyId = Annotated[str, Path(min_length=1, max_length=255)]


def known_keys(request: Request) -> ApiKeyCache:
    return services_of(request).get(ApiKeyCache)


Known = Annotated[ApiKeyCache, Depends(known_keys)]


@router.post("/keys", status_code=201, openapi_extra=request_body_schema(KeyRequest))
async def create_key(caller: AdminCaller, db: DatabaseDep, body: JsonBody) -> NewKeyView:
    asked = parse_body(KeyRequest, body)
    async with db.write() as session:
        row, key = await service.create_key(session, caller.project_id, asked, actor=caller.key_prefix)
    return NewKeyView(**KeyView.of(row).model_dump(), key=key)


@router.get("/keys")
async def list_keys(
    caller: AdminCaller,
    db: DatabaseDep,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    after: Annotated[str | None, Query(min_length=1, max_length=255)] = None,
) -> KeyList:
    async with db.read() as session:
        last = await service.key(session, caller.project_id, after, param="after") if after else None
        rows = await repository.keys_of(session, caller.project_id, last, limit + 1)
    return KeyList.of(rows, limit)


@router.get("/keys/{key_id}")
async def get_key(key_id: KeyId, caller: AdminCaller, db: DatabaseDep) -> KeyView:
    async with db.read() as session:
        return KeyView.of(await service.key(session, caller.project_id, key_id))


@router.delete("/keys/{key_id}")
async def revoke_key(key_id: KeyId, caller: AdminCaller, db: DatabaseDep, known: Known) -> KeyView:
    async with db.write() as session:
        row = await service.revoke_key(session, caller.project_id, key_id, actor=caller.key_prefix)
    known.forget()
    return KeyView.of(row)


@router.get("/project")
async def get_project(caller: AdminCaller, db: DatabaseDep) -> ProjectView:
    async with db.read() as session:
        return ProjectView.of(await repository.project(session, caller.project_id))


@router.patch("/project", openapi_extra=request_body_schema(ProjectRequest))
async def change_project(caller: AdminCaller, db: DatabaseDep, body: JsonBody, known: Known) -> ProjectView:
    asked = parse_body(ProjectRequest, body)
    async with db.write() as session:
        project = await service.set_consent(session, caller.project_id, asked.train, actor=caller.key_prefix)
    known.forget()
    return ProjectView.of(project)
