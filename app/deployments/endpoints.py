"""/v1/policies/{name}/deployment, /deploy, /rollback, /canary, /shadow and /delivery: which version serves whom."""

from typing import Annotated, Any

from fastapi import APIRouter, Request
from pydantic import BaseModel
from sqlalchemy import null
from sqlalchemy.ext.asyncio import AsyncSession

from alignment.release.canary import CanaryConfig
from alignment.release.shadow import disabled_reason
from app.core.errors import ERROR_RESPONSES, BadRequest, Conflict
from app.core.http import json_body
from app.core.services import services_of, settings_of
from app.core.settings import Settings
from app.deployments import canary as canaries
from app.deployments import service as deployment_service
from app.deployments import shadow as shadows
from app.deployments.router import VersionRouter
from app.deployments.schemas import (
    ArmView,
    CanaryView,
    DeliveryRequest,
    DeploymentView,
    DeployRequest,
    RollbackRequest,
    RollbackResult,
    ShadowView,
)
from app.models import AuditAction, ConversationRouting, Deployment, Policy, Version, record_audit
from app.policies import repository, service
from app.policies.references import PolicyName, version_name
from app.projects.auth import AdminCaller, DatabaseDep
from app.training.reward_config import effective_rewards
from app.training.schemas import ReasonBody

SHADOW_ABORTED = "an operator aborted its shadow deployment"
router = APIRouter(prefix="/v1/policies/{name}", tags=["deployment"], responses=ERROR_RESPONSES)


@router.get("/deployment")
async def get_deployment(name: PolicyName, request: Request, caller: AdminCaller, db: DatabaseDep) -> DeploymentView:
    """Return which version serves, and the statistics of the canary and of the shadow deployment."""
    async with db.read() as session:
        policy = await service.get_policy(session, caller.project_id, name)
        return await _view_deployment(session, policy, settings_of(request))


@router.post("/deploy")
async def deploy(
    name: PolicyName,
    request: Request,
    caller: AdminCaller,
    db: DatabaseDep,
    body: Annotated[DeployRequest, json_body(DeployRequest)],
) -> DeploymentView:
    """Deploy a version to everybody, or with `share` to some.

    With adapters nothing is reloaded and running replies finish on their version. With full weights new requests wait
    until an engine has the weights.
    """
    if body.share is not None:
        service.require_adapters(settings_of(request), "A canary")
    audit: dict[str, Any] = {"actor": caller.key_prefix, "reason": body.reason}
    async with db.write() as session:
        policy = await service.get_policy(session, caller.project_id, name)
        if body.share is None:
            await deployment_service.deploy(session, policy, body.version, **audit)
        else:
            await deployment_service.lock_deployment(session, policy)
            version = await deployment_service.get_served_version(session, policy, body.version)
            await deployment_service.start_canary(session, policy, version, body.share, watched=body.watch, **audit)
    return await _view_changed_deployment(name, request, caller.project_id, db)


@router.post("/rollback")
async def roll_back(
    name: PolicyName,
    request: Request,
    caller: AdminCaller,
    db: DatabaseDep,
    body: Annotated[RollbackRequest, json_body(RollbackRequest)],
) -> RollbackResult:
    """Undo the latest release, or return to an older version; training continues from there."""
    async with db.write() as session:
        policy = await service.get_policy(session, caller.project_id, name)
        rolled_back, serving = await deployment_service.roll_back(
            session,
            policy,
            body.version,
            from_version=body.from_version,
            actor=caller.key_prefix,
            reason=body.reason,
        )
    services_of(request).get(VersionRouter).forget()
    return RollbackResult(
        policy=name, rolled_back=version_name(policy, rolled_back), serving=version_name(policy, serving)
    )


@router.post("/canary/promote")
async def promote_canary(
    name: PolicyName, request: Request, caller: AdminCaller, db: DatabaseDep, body: ReasonBody
) -> DeploymentView:
    """Deploy the canary to everybody. 409 without a canary."""
    async with db.write() as session:
        policy = await service.get_policy(session, caller.project_id, name)
        deployment = await deployment_service.lock_deployment(session, policy)
        if deployment.canary_version_id is None:
            raise _no_canary(policy)
        version = await repository.get_version(session, deployment.canary_version_id)
        await deployment_service.deploy(session, policy, version.number, actor=caller.key_prefix, reason=body.reason)
    return await _view_changed_deployment(name, request, caller.project_id, db)


@router.post("/canary/abort")
async def abort_canary(
    name: PolicyName, request: Request, caller: AdminCaller, db: DatabaseDep, body: ReasonBody
) -> DeploymentView:
    """Return everybody to the version that serves. 409 without a canary."""
    async with db.write() as session:
        policy = await service.get_policy(session, caller.project_id, name)
        await deployment_service.lock_deployment(session, policy)
        if await deployment_service.abort_canary(session, policy, actor=caller.key_prefix, reason=body.reason) is None:
            raise _no_canary(policy)
    return await _view_changed_deployment(name, request, caller.project_id, db)


@router.post("/shadow/promote")
async def promote_shadow(
    name: PolicyName, request: Request, caller: AdminCaller, db: DatabaseDep, body: ReasonBody
) -> DeploymentView:
    """Publish the version in shadow, as a canary or to everybody, as new versions are. 409 without one."""
    async with db.write() as session:
        policy, version = await _lock_shadow_version(session, caller.project_id, name)
        shadows.pass_shadow(session, policy, version, actor=caller.key_prefix, reason=body.reason)
    return await _view_changed_deployment(name, request, caller.project_id, db)


@router.post("/shadow/abort")
async def abort_shadow(
    name: PolicyName, request: Request, caller: AdminCaller, db: DatabaseDep, body: ReasonBody
) -> DeploymentView:
    """Reject the version in shadow; training continues from the version that serves. 409 without one."""
    async with db.write() as session:
        policy, version = await _lock_shadow_version(session, caller.project_id, name)
        await deployment_service.reject_version(
            session, policy, version, actor=caller.key_prefix, reason=body.reason or SHADOW_ABORTED
        )
    return await _view_changed_deployment(name, request, caller.project_id, db)


@router.put("/delivery")
async def put_delivery(
    name: PolicyName,
    request: Request,
    caller: AdminCaller,
    db: DatabaseDep,
    body: Annotated[DeliveryRequest, json_body(DeliveryRequest)],
) -> DeploymentView:
    """Set how new versions are released, from the next request and the next version on.

    The current canary stays as it is. The current shadow deployment goes on under the new setting.
    """
    settings = settings_of(request)
    if body.canary is not None:
        service.require_adapters(settings, "A canary")
    if body.shadow is not None:
        service.require_adapters(settings, "A shadow")
    if body.conversations == ConversationRouting.STICKY:
        service.require_adapters(settings, "A conversation that stays on its version")
    async with db.write() as session:
        policy = await service.get_policy(session, caller.project_id, name)
        await deployment_service.lock_deployment(session, policy)
        if body.shadow is not None and (reason := disabled_reason(body.shadow, effective_rewards(policy, settings))):
            raise BadRequest(f"No version could run in shadow: {reason}.", param="shadow")
        policy.conversations = body.conversations
        canary_config, shadow_config = _to_json(body.canary), _to_json(body.shadow)
        policy.canary = null() if canary_config is None else canary_config  # None would be stored as JSON null
        policy.shadow = null() if shadow_config is None else shadow_config
        record_audit(
            session,
            caller.key_prefix,
            AuditAction.DELIVERY_UPDATED,
            policy.name,
            project_id=policy.project_id,
            conversations=body.conversations,
            canary=canary_config,
            shadow=shadow_config,
        )
    return await _view_changed_deployment(name, request, caller.project_id, db)


def _to_json(config: BaseModel | None) -> dict[str, Any] | None:
    return None if config is None else config.model_dump(mode="json")


async def _view_changed_deployment(name: str, request: Request, project_id: str, db: DatabaseDep) -> DeploymentView:
    services_of(request).get(VersionRouter).forget()
    async with db.read() as session:
        policy = await service.get_policy(session, project_id, name)
        return await _view_deployment(session, policy, settings_of(request))


async def _view_deployment(session: AsyncSession, policy: Policy, settings: Settings) -> DeploymentView:
    deployment = await repository.get_deployment(session, policy.id)
    serving = version_name(policy, await repository.get_version(session, deployment.version_id))
    previous_id = deployment.previous_version_id
    config = canaries.effective_canary(policy, settings)
    return DeploymentView(
        policy=policy.name,
        serving=serving,
        previous=version_name(policy, await repository.get_version(session, previous_id)) if previous_id else None,
        canary=await _view_canary(session, policy, deployment, config or CanaryConfig(), serving),
        shadow=await _view_shadow(session, policy, deployment, settings, serving),
        epoch=deployment.epoch,
        changed_at=deployment.changed_at,
        conversations=policy.conversations,
        canary_overridden=policy.canary is not None,
        canary_config=config,
        shadow_overridden=policy.shadow is not None,
        shadow_config=shadows.effective_shadow(policy, settings),
    )


async def _view_canary(
    session: AsyncSession, policy: Policy, deployment: Deployment, config: CanaryConfig, serving: str
) -> CanaryView | None:
    if deployment.canary_version_id is None or deployment.canary_since is None:
        return None
    version = await repository.get_version(session, deployment.canary_version_id)
    candidate, stable, decision = await canaries.evaluate_canary(session, deployment, config)
    return CanaryView.of(
        share=deployment.canary_share,
        since=deployment.canary_since,
        until=deployment.canary_since + config.patience_seconds,
        watched=deployment.canary_watched,
        candidate=ArmView.of(version_name(policy, version), candidate),
        stable=ArmView.of(serving, stable),
        decision=decision,
    )


async def _view_shadow(
    session: AsyncSession, policy: Policy, deployment: Deployment, settings: Settings, serving: str
) -> ShadowView | None:
    version = await repository.find_shadow_version(session, policy.id)
    if version is None or version.shadow_since is None:
        return None
    config, rewards = shadows.active_shadow_config(policy, settings), effective_rewards(policy, settings)
    candidate, stable, pairs, decision = await shadows.evaluate_shadow(
        session, version, deployment.version_id, config, rewards
    )
    return ShadowView.of(
        share=config.share,
        since=version.shadow_since,
        candidate=ArmView.of(version_name(policy, version), candidate),
        stable=ArmView.of(serving, stable),
        pairs=pairs,
        disabled_reason=disabled_reason(config, rewards),
        decision=decision,
    )


async def _lock_shadow_version(session: AsyncSession, project_id: str, name: str) -> tuple[Policy, Version]:
    """Lock the policy; return it and its version in shadow. Raises Conflict without one."""
    policy = await service.get_policy(session, project_id, name)
    await deployment_service.lock_deployment(session, policy)
    version = await repository.find_shadow_version(session, policy.id)
    if version is None:
        raise Conflict(f"No version of '{policy.name}' is in shadow.", code="no_shadow")
    return policy, version


def _no_canary(policy: Policy) -> Conflict:
    return Conflict(f"Policy '{policy.name}' has no canary.", code="no_canary")
