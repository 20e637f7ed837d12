"""/v1/policies/{name}/pins: conversations, end users and API keys that are held on one version."""

from typing import Annotated

from fastapi import APIRouter, Path, Query, Request

from app.core.errors import ERROR_RESPONSES
from app.core.http import json_body
from app.core.pagination import Page
from app.core.services import services_of, settings_of
from app.deployments import pins
from app.deployments.router import VersionRouter
from app.deployments.schemas import PinDeleted, PinRequest, PinView
from app.models import PinKind
from app.policies import service as policies
from app.policies.references import PolicyName
from app.projects.auth import AdminCaller, DatabaseDep
from app.training import service as training_service

router = APIRouter(prefix="/v1/policies/{name}/pins", tags=["pins"], responses=ERROR_RESPONSES)
PinId = Annotated[str, Path(min_length=1, max_length=48)]


@router.put("")
async def set_pin(
    name: PolicyName,
    request: Request,
    caller: AdminCaller,
    db: DatabaseDep,
    body: Annotated[PinRequest, json_body(PinRequest)],
) -> PinView:
    """Pin a subject to a version, from its next request on. Idempotent; another version changes the pin."""
    policies.require_adapters(settings_of(request), "A pin")
    async with db.write() as session:
        policy = await training_service.lock_policy(session, caller.project_id, name)
        pin, version = await pins.set_pin(session, policy, body, actor=caller.key_prefix)
        loaded = pins.is_loaded_somewhere(await policies.list_ready_engines(session), version)
    services_of(request).get(VersionRouter).forget()
    return PinView.of(policy, pin, version, loaded=loaded)


@router.get("")
async def list_pins(
    name: PolicyName,
    caller: AdminCaller,
    db: DatabaseDep,
    kind: PinKind | None = None,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    after: Annotated[str | None, Query(min_length=1, max_length=48, description="a pin's id")] = None,
) -> Page[PinView]:
    """Return the policy's pins, by id."""
    async with db.read() as session:
        policy = await policies.get_policy(session, caller.project_id, name)
        rows = await pins.list_pins(session, policy.id, kind, after, limit)
        engines = await policies.list_ready_engines(session)
    views = [
        PinView.of(policy, pin, version, loaded=pins.is_loaded_somewhere(engines, version)) for pin, version in rows
    ]
    return Page.from_rows(views, limit)


@router.delete("/{pin_id}")
async def remove_pin(
    name: PolicyName, pin_id: PinId, request: Request, caller: AdminCaller, db: DatabaseDep
) -> PinDeleted:
    """Remove a pin: the deployment and the canary decide about its subject again."""
    async with db.write() as session:
        policy = await training_service.lock_policy(session, caller.project_id, name)
        await pins.remove_pin(session, policy, pin_id, actor=caller.key_prefix)
    services_of(request).get(VersionRouter).forget()
    return PinDeleted(id=pin_id)
