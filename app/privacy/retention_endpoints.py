"""/v1/retention: how long a project keeps its data, what has expired, and its removal."""

import asyncio
from typing import Annotated, Literal

from fastapi import APIRouter, Request
from pydantic import BaseModel, Field, ValidationError

from app.core.errors import ERROR_RESPONSES
from app.core.http import StrictModel, json_body, settings_of, validation_error
from app.core.retention_config import RetentionConfig
from app.models import AuditAction, Project, record_audit
from app.policies.context import PolicyDep
from app.policies.references import version_name
from app.policies.service import get_policy
from app.privacy import retention, retention_files, retention_preview
from app.projects.auth import AdminCaller, DatabaseDep, LongRunningDatabaseDep, ViewingCaller
from app.projects.idempotency import IdempotentRoute

router = APIRouter(prefix="/v1", tags=["retention"], route_class=IdempotentRoute, responses=ERROR_RESPONSES)
MAX_PRUNED = 1000  # versions in one request


class RetentionView(BaseModel):
    object: Literal["retention"] = "retention"
    effective: RetentionConfig = Field(description="what applies now; null is for ever")
    own: dict[str, float | None] = Field(description="the project's own values; the deployment's apply to the others")


class ExpiredView(BaseModel):
    kind: str
    rows: int
    bytes: int = Field(description="of the contents; a database reuses the space")


class PreviewView(BaseModel):
    object: Literal["retention.preview"] = "retention.preview"
    data: list[ExpiredView]


class RunView(BaseModel):
    object: Literal["retention.run"] = "retention.run"
    removed: dict[str, int] = Field(description="rows by kind; there may be more, unless all are 0")


class PruneRequest(StrictModel):
    keep: Annotated[int, Field(ge=1, le=1_000_000, description="the newest versions whose files stay")]
    dry_run: bool = Field(False, description="only say what would go")


class PruneView(BaseModel):
    object: Literal["versions.pruned"] = "versions.pruned"
    dry_run: bool
    versions: list[str]
    bytes: int
    has_more: bool = Field(description="more versions are left to prune; repeat the request")


def _view(project: Project, request: Request) -> RetentionView:
    effective = retention.effective_retention(project, settings_of(request))
    return RetentionView(effective=effective, own=retention.own_retention(project))


@router.get("/retention")
async def get_retention(request: Request, caller: ViewingCaller, db: DatabaseDep) -> RetentionView:
    async with db.read() as session:
        return _view(await session.get_one(Project, caller.project_id), request)


@router.put("/retention")
async def put_retention(
    request: Request,
    caller: AdminCaller,
    db: DatabaseDep,
    body: Annotated[dict[str, object], json_body(RetentionConfig, dict)],
) -> RetentionView:
    """Replace the project's own values. A value that is missing is the deployment's; null and 0 are for ever."""
    async with db.write() as session:
        project = await session.get_one(Project, caller.project_id, with_for_update=True)
        default = settings_of(request).privacy.retention.model_dump(exclude={"logs"})
        try:
            config = RetentionConfig.model_validate(default | body)
        except ValidationError as error:
            raise validation_error(error, RetentionConfig) from error
        own = config.model_dump(include=set(body))
        project.retention = own
        action = AuditAction.RETENTION_UPDATED
        record_audit(session, caller.key_prefix, action, project.id, project_id=project.id, **own)
        return _view(project, request)


@router.get("/retention/preview")
async def preview_retention(request: Request, caller: ViewingCaller, db: LongRunningDatabaseDep) -> PreviewView:
    """Return what has expired, by kind, without removing it."""
    settings = settings_of(request)
    async with db.read() as session:
        project = await session.get_one(Project, caller.project_id)
        config = retention.effective_retention(project, settings)
        expired = await retention_preview.preview(session, project.id, config, settings)
    return PreviewView(data=[ExpiredView(**row._asdict()) for row in expired])


@router.post("/retention/run")
async def run_retention(request: Request, caller: AdminCaller, db: DatabaseDep) -> RunView:
    """Remove one step of each kind of expired rows now. Files and the rest follow in the background."""
    async with db.read() as session:
        config = retention.effective_retention(await session.get_one(Project, caller.project_id), settings_of(request))
    removed: dict[str, int] = {}
    for kind in retention.STEPS:
        if (days := getattr(config, kind)) is not None:
            removed[kind] = await retention.remove_expired(db, caller.project_id, kind, days, caller.key_prefix)
    return RunView(removed=removed)


@router.post("/policies/{name}/versions/prune")
async def prune_versions(context: PolicyDep, body: Annotated[PruneRequest, json_body(PruneRequest)]) -> PruneView:
    """Delete the files of old versions. Their rows stay; they cannot be deployed any more."""
    async with context.db.read() as session:
        policy = await get_policy(session, context.caller.project_id, context.name)
        prunable = await retention_files.select_prunable(session, policy, body.keep, context.settings)
    names = [version_name(policy, version) for version in prunable[:MAX_PRUNED]]
    if body.dry_run:
        paths = [version.adapter_path for version in prunable[:MAX_PRUNED]]
        num_bytes = await asyncio.to_thread(retention_files.total_bytes, paths)
    else:
        names, num_bytes = await retention_files.prune_versions(
            context.db, policy.id, body.keep, context.settings, actor=context.actor, limit=MAX_PRUNED
        )
    has_more = len(prunable) > MAX_PRUNED
    return PruneView(dry_run=body.dry_run, versions=names, bytes=num_bytes, has_more=has_more)
