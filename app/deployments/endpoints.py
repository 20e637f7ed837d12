"""/v1/policies/{name}/deployment, /deploy, /rollback, /canary, /shadow, /delivery, /pins: which version serves whom."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated

from fastapi import APIRouter, Path, Query
from sqlalchemy import null
from sqlalchemy.ext.asyncio import AsyncSession

from alignment.release.shadow import disabled_reason
from app.core.errors import ERROR_RESPONSES, BadRequest, Conflict
from app.core.http import json_body, services_of
from app.core.pagination import Page
from app.deployments import pins, rollback_preview, service
from app.deployments.rollback_preview import RollbackPreview
from app.deployments.schemas import (
    DeliveryRequest,
    DeploymentView,
    DeployRequest,
    PinDeleted,
    PinRequest,
    PinView,
    RollbackRequest,
    RollbackResult,
)
from app.deployments.version_router import VersionRouter
from app.deployments.views import view_deployment, view_pin, view_pins
from app.engines import fleet
from app.engines.adaptation import adaptation_of
from app.models import AuditAction, ConversationRouting, PinKind, Policy, Version
from app.policies import repository
from app.policies import service as policies
from app.policies.context import OperatedPolicyDep, PolicyContentDep, PolicyContext, ReasonBody, ViewedPolicyDep
from app.policies.locks import LockedPolicy
from app.policies.references import version_name
from app.projects.auth import limits_of
from app.projects.idempotency import IdempotentRoute
from app.training.policy_config import effective_rewards

SHADOW_ABORTED = "an operator aborted its shadow deployment"
router = APIRouter(
    prefix="/v1/policies/{name}", tags=["deployment"], route_class=IdempotentRoute, responses=ERROR_RESPONSES
)
pin_router = APIRouter(prefix="/v1/policies/{name}/pins", tags=["pins"], responses=ERROR_RESPONSES)


@router.get("/deployment")
async def get_deployment(context: ViewedPolicyDep) -> DeploymentView:
    """Return which version serves, and the statistics of the canary and of the shadow deployment."""
    return await _view(context)


@router.post("/deploy")
async def deploy(
    context: OperatedPolicyDep, body: Annotated[DeployRequest, json_body(DeployRequest)]
) -> DeploymentView:
    """Deploy a version to everybody, or with `share` to some.

    With adapters nothing is reloaded and running replies finish on their version. With full weights new requests wait
    until an engine has the weights.
    """
    by = context.attribute(body.reason)
    if body.share is not None:
        adaptation_of(context.settings).require_several_versions("A canary")
    async with _change(context) as locked:
        if body.share is None:
            await service.deploy(locked, body.version, by)
        else:
            version = await service.get_served_version(*locked, body.version)
            await service.require_untainted(*locked, version)
            await service.start_canary(locked, version, body.share, by, watched=body.watch)
    return await _view(context)


@router.post("/rollback")
async def roll_back(
    context: OperatedPolicyDep, body: Annotated[RollbackRequest, json_body(RollbackRequest)]
) -> RollbackResult:
    """Undo the latest release, or return to an older version; training continues from there."""
    async with _change(context) as locked:
        by = context.attribute(body.reason)
        versions = await service.roll_back(locked, body.version, by, from_version=body.from_version)
    rolled_back, serving = (version_name(locked.policy, version) for version in versions)
    return RollbackResult(policy=context.name, rolled_back=rolled_back, serving=serving)


@router.get("/rollback")
async def preview_rollback(
    context: OperatedPolicyDep,
    version: Annotated[int | None, Query(ge=0, le=999_999_999)] = None,
    from_version: Annotated[int | None, Query(ge=0, le=999_999_999)] = None,
) -> RollbackPreview:
    """Return what POST with the same fields would change, or the error that it would return. Nothing is changed."""
    if version is not None and from_version is not None:
        raise BadRequest("Give either 'version', to return to, or 'from_version', to roll back.", param="version")
    return await rollback_preview.preview_rollback(context, version, from_version)


@router.post("/canary/promote")
async def promote_canary(context: OperatedPolicyDep, body: ReasonBody) -> DeploymentView:
    """Deploy the canary to everybody. 409 without a canary."""
    async with _change(context) as locked:
        session, policy = locked
        deployment = await repository.get_deployment(session, policy.id)
        if deployment.canary_version_id is None:
            raise _no_canary(policy)
        version = await repository.get_version(session, deployment.canary_version_id)
        await service.deploy(locked, version.number, context.attribute(body.reason))
    return await _view(context)


@router.post("/canary/abort")
async def abort_canary(context: OperatedPolicyDep, body: ReasonBody) -> DeploymentView:
    """Return everybody to the version that serves. 409 without a canary."""
    async with _change(context) as locked:
        if await service.abort_canary(locked, context.attribute(body.reason)) is None:
            raise _no_canary(locked.policy)
    return await _view(context)


@router.post("/shadow/promote")
async def promote_shadow(context: OperatedPolicyDep, body: ReasonBody) -> DeploymentView:
    """Publish the version in shadow, as a canary or to everybody, as new versions are. 409 without one."""
    async with _change(context) as locked:
        version = await _get_shadow_version(*locked)
        await service.require_untainted(*locked, version)
        service.pass_shadow(locked, version, context.attribute(body.reason))
    return await _view(context)


@router.post("/shadow/abort")
async def abort_shadow(context: OperatedPolicyDep, body: ReasonBody) -> DeploymentView:
    """Reject the version in shadow; training continues from the version that serves. 409 without one."""
    async with _change(context) as locked:
        version = await _get_shadow_version(*locked)
        reason = body.reason or SHADOW_ABORTED
        await service.reject_version(locked, version, actor=context.actor, reason=reason)
    return await _view(context)


@router.put("/delivery")
async def put_delivery(
    context: OperatedPolicyDep, body: Annotated[DeliveryRequest, json_body(DeliveryRequest)]
) -> DeploymentView:
    """Set how new versions are released, from the next request and the next version on.

    The current canary stays as it is. The current shadow deployment goes on under the new setting.
    """
    settings = context.settings
    if body.canary is not None:
        adaptation_of(settings).require_several_versions("A canary")
    if body.shadow is not None:
        adaptation_of(settings).require_several_versions("A shadow")
    if body.conversations == ConversationRouting.STICKY:
        adaptation_of(settings).require_several_versions("A conversation that stays on its version")
    async with _change(context) as (session, policy):
        if body.shadow is not None and (reason := disabled_reason(body.shadow, effective_rewards(policy, settings))):
            raise BadRequest(f"No version could run in shadow: {reason}.", param="shadow")
        details = body.model_dump(mode="json")
        policy.conversations = body.conversations
        policy.canary = details["canary"] or null()  # None would be stored as JSON null
        policy.shadow = details["shadow"] or null()
        policies.audit_policy(session, policy, AuditAction.DELIVERY_UPDATED, context.actor, **details)
    return await _view(context)


@pin_router.put("")
async def set_pin(context: OperatedPolicyDep, body: Annotated[PinRequest, json_body(PinRequest)]) -> PinView:
    """Pin a subject to a version, from its next request on. Idempotent; another version changes the pin."""
    adaptation_of(context.settings).require_several_versions("A pin")
    async with _change(context) as locked:
        limit = limits_of(context.request, context.caller).pins
        pin, version = await pins.set_pin(locked, body, actor=context.actor, limit=limit)
        engines = await fleet.list_ready_engines(locked.session)
    return view_pin(locked.policy, pin, version, engines)


@pin_router.get("")
async def list_pins(
    context: PolicyContentDep,
    kind: PinKind | None = None,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    after: Annotated[str | None, Query(min_length=1, max_length=48, description="a pin's id")] = None,
) -> Page[PinView]:
    """Return the policy's pins, by id."""
    async with context.read() as (session, policy):
        return await view_pins(session, policy, limit, kind, after)


@pin_router.delete("/{pin_id}")
async def remove_pin(
    context: OperatedPolicyDep, pin_id: Annotated[str, Path(min_length=1, max_length=48)]
) -> PinDeleted:
    """Remove a pin: the deployment and the canary decide about its subject again."""
    async with _change(context) as locked:
        await pins.remove_pin(locked, pin_id, actor=context.actor)
    return PinDeleted(id=pin_id)


async def _view(context: PolicyContext) -> DeploymentView:
    """Return the deployment as it is now. After an act it is read when the policy is no longer locked."""
    async with context.read() as (session, policy):
        return await view_deployment(session, policy, context.settings)


@asynccontextmanager
async def _change(context: PolicyContext) -> AsyncIterator[LockedPolicy]:
    """Open a write transaction with the policy locked, and drop the cached routes after its commit."""
    async with context.write() as locked:
        yield locked
    services_of(context.request).get(VersionRouter).forget()


async def _get_shadow_version(session: AsyncSession, policy: Policy) -> Version:
    version = await repository.find_shadow_version(session, policy.id)
    if version is None:
        raise Conflict(f"No version of '{policy.name}' is in shadow.", code="no_shadow")
    return version


def _no_canary(policy: Policy) -> Conflict:
    return Conflict(f"Policy '{policy.name}' has no canary.", code="no_canary")
