"""/v1/keys and /v1/project, for the admins of the project."""

from typing import Annotated, Literal, Self

from fastapi import APIRouter, Path, Query, Request
from pydantic import Field, StrictBool, StrictInt, StringConstraints, field_validator, model_validator

from app.core.errors import ERROR_RESPONSES, BadRequest
from app.core.http import StrictModel, json_body, services_of, settings_of
from app.core.project_limits import ProjectLimits
from app.models import Project
from app.projects import service
from app.projects.auth import AdminCaller, ApiKeyCache, DatabaseDep, ViewingCaller
from app.projects.idempotency import SHOWS_SECRET, IdempotentRoute
from app.projects.scopes import SCOPES
from app.projects.views import KeyList, KeyView, NewKeyView, ProjectView

router = APIRouter(prefix="/v1", tags=["projects"], route_class=IdempotentRoute, responses=ERROR_RESPONSES)
KeyId = Annotated[str, Path(min_length=1, max_length=255)]
Name = Annotated[str, StringConstraints(min_length=1, max_length=63)]
Scope = Literal["chat", "feedback", "feedback:programs", "viewer", "viewer:content", "annotator", "operator", "admin"]
Count = Annotated[StrictInt, Field(ge=1, le=1_000_000)]
TEN_YEARS = 10 * 366 * 86_400


class KeyRequest(StrictModel):
    name: Name | None = Field(None, description="a label for the owner's own use")
    scopes: list[Scope] = Field(
        ["chat", "feedback", "feedback:programs", "admin"],
        min_length=1,
        max_length=len(SCOPES),
        description="what the key may do; the default includes everything",
    )
    expires_in: Annotated[StrictInt, Field(ge=1, le=TEN_YEARS)] | None = Field(
        None, description="seconds until the key expires; null: never"
    )
    train: StrictBool | None = Field(None, description="consent to train on this key's turns; the project's when null")
    requests_per_minute: Count | None = Field(None, description="at most the deployment's limit, which holds when null")
    max_concurrency: Count | None = Field(
        None, description="requests at the same time, in each API process; at most the deployment's limit, as above"
    )

    @field_validator("scopes")
    @classmethod
    def remove_duplicates(cls, scopes: list[str]) -> list[str]:
        return [scope for scope in SCOPES if scope in scopes]


class ProjectRequest(StrictModel):
    train: StrictBool | None = Field(
        None, description="consent to train on the project's turns; keys and requests may differ"
    )
    limits: ProjectLimits | None = Field(
        None, description="the project's limits that change; each at most the one in force. The operator can raise them"
    )

    @model_validator(mode="after")
    def check_change(self) -> Self:
        if self.train is None and self.limits is None:
            raise ValueError("give 'train' or 'limits'")
        return self


@router.post("/keys", status_code=201, dependencies=[SHOWS_SECRET])
async def create_key(
    request: Request, caller: AdminCaller, db: DatabaseDep, body: Annotated[KeyRequest, json_body(KeyRequest)]
) -> NewKeyView:
    """Create a key. Its limits may not exceed those of the deployment."""
    for param in ("requests_per_minute", "max_concurrency"):
        limit = getattr(settings_of(request).limits, param)
        if (getattr(body, param) or 0) > limit:
            raise BadRequest(f"{param}: the deployment's limit is {limit}.", param=param, code="invalid_value")
    async with db.write() as session:
        row, key = await service.create_key(session, caller.project_id, actor=caller.key_prefix, **body.model_dump())
    return NewKeyView.from_row(row, key=key)


@router.get("/keys")
async def list_keys(
    caller: AdminCaller,
    db: DatabaseDep,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    after: Annotated[str | None, Query(min_length=1, max_length=255)] = None,
) -> KeyList:
    async with db.read() as session:
        rows = await service.list_keys(session, caller.project_id, after, limit)
    return KeyList.from_rows([KeyView.from_row(row) for row in rows], limit)


@router.get("/keys/{key_id}")
async def get_key(key_id: KeyId, caller: AdminCaller, db: DatabaseDep) -> KeyView:
    async with db.read() as session:
        return KeyView.from_row(await service.get_key(session, caller.project_id, key_id))


@router.delete("/keys/{key_id}")
async def revoke_key(request: Request, key_id: KeyId, caller: AdminCaller, db: DatabaseDep) -> KeyView:
    async with db.write() as session:
        row = await service.revoke_key(session, caller.project_id, key_id, actor=caller.key_prefix)
    services_of(request).get(ApiKeyCache).forget()
    return KeyView.from_row(row)


@router.get("/project")
async def get_project(request: Request, caller: ViewingCaller, db: DatabaseDep) -> ProjectView:
    async with db.read() as session:
        return ProjectView.of(await session.get_one(Project, caller.project_id), settings_of(request))


@router.patch("/project")
async def change_project(
    request: Request, caller: AdminCaller, db: DatabaseDep, body: Annotated[ProjectRequest, json_body(ProjectRequest)]
) -> ProjectView:
    """Change the consent to training, or lower limits."""
    settings = settings_of(request)
    async with db.write() as session:
        project = await session.get_one(Project, caller.project_id)
        if body.train is not None:
            project = await service.set_consent(session, caller.project_id, body.train, actor=caller.key_prefix)
        if body.limits is not None:
            in_force = ProjectView.of(project, settings).limits
            project = await service.set_limits(
                session, caller.project_id, body.limits, actor=caller.key_prefix, at_most=in_force
            )
    services_of(request).get(ApiKeyCache).forget()
    return ProjectView.of(project, settings)
