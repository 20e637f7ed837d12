"""/v1/policies/{name}/pins: who is held on one version."""

from typing import Annotated

from fastapi import APIRouter, Path, Query, Request

from app.core.errors import DOCUMENTED
from app.core.http import JsonBody, parse_body, request_body_schema
from app.core.pagination import Page
from app.core.services import services_of, settings_of
from app.deployments.pins import repository, service
from app.deployments.pins.schemas import PinDeleted, PinRequest, PinView
from app.deployments.router import VersionRouter
from app.models import PinKind
from app.policies import service as policies
from app.policies.endpoints import PolicyName
from app.projects.auth import AdminCaller, DatabaseDep
from app.training import service as training_service

router = APIRouter(prefix="/v1/policies/{name}/pins", tags=["pins"], responses=DOCUMENTED)
PinId = Annotated[str, Path(min_length=1, max_length=48)]


@router.put("", openapi_extra=request_body_schema(PinRequest))
async def set_pin(name: PolicyName, request: Request, caller: AdminCaller, db: DatabaseDep, body: JsonBody) -> PinView:
    """From the subject's next request on. Idempotent; another version moves the pin."""
    asked = parse_body(PinRequest, body)
    policies.refuse_beside(settings_of(request), "A pin")
    async with db.write() as session:
        policy = await training_service.locked(session, caller.project_id, name)
        row, version = await service.pin(session, policy, asked, actor=caller.key_prefix)
        loaded = service.loaded(await policies.ready_engines(session), version)
    services_of(request).get(VersionRouter).forget()
    return PinView.of(policy, row, version, loaded=loaded)


@router.get("")
async def list_pins(
    name: PolicyName,
    caller: AdminCaller,
    db: DatabaseDep,
    kind: PinKind | None = None,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    after: Annotated[str | None, Query(min_length=1, max_length=48, description="a pin's id")] = None,
) -> Page[PinView]:
    """By id."""
    async with db.read() as session:
        policy = await policies.named(session, caller.project_id, name)
        rows = await repository.pins(session, policy.id, kind, after, limit + 1)
        engines = await policies.ready_engines(session)
    views = [PinView.of(policy, row, version, loaded=service.loaded(engines, version)) for row, version in rows]
    return Page.cut(views, limit)


@router.delete("/{pin_id}")
async def remove_pin(
    name: PolicyName, pin_id: PinId, request: Request, caller: AdminCaller, db: DatabaseDep
) -> PinDeleted:
    """Its subject is answered by whatever the pointer and the canary say again."""
    async with db.write() as session:
        policy = await training_service.locked(session, caller.project_id, name)
        await service.unpin(session, policy, pin_id, actor=caller.key_prefix)
    services_of(request).get(VersionRouter).forget()
    return PinDeleted(id=pin_id)
