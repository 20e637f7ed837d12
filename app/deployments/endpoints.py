"""/v1/policies/{name}/deployment, /deploy, /canary, /shadow and /delivery: which version reaches whom."""

from fastapi import APIRouter, Request
from sqlalchemy import null
from sqlalchemy.ext.asyncio import AsyncSession

from alignment.release.canary import CanaryConfig
from alignment.release.shadow import idle
from app.core.errors import DOCUMENTED, BadRequest, Conflict
from app.core.http import JsonBody, parse_body, request_body_schema
from app.core.services import services_of, settings_of
from app.core.settings import Settings
from app.deployments import canary_metrics, shadow, shadow_metrics
from app.deployments import service as deployment_service
from app.deployments.router import VersionRouter
from app.deployments.schemas import (
    ArmView,
    CanaryView,
    DeliveryRequest,
    DeploymentView,
    DeployRequest,
    ShadowView,
)
from app.models import ConversationRouting, Deployment, Policy, Version, record_audit
from app.policies import repository, service
from app.policies.endpoints import PolicyName
from app.projects.auth import AdminCaller, DatabaseDep
from app.training.policy_rewards import rewards_of
from app.training.schemas import Reason

ENDED = "its shadow deployment was ended by hand"
router = APIRouter(prefix="/v1/policies/{name}", tags=["deployment"], responses=DOCUMENTED)


@router.get("/deployment")
async def get_deployment(name: PolicyName, request: Request, caller: AdminCaller, db: DatabaseDep) -> DeploymentView:
    """Who is answered by what, and how the canary does."""
    async with db.read() as session:
        return await _view(session, await service.named(session, caller.project_id, name), settings_of(request))


@router.post("/deploy", openapi_extra=request_body_schema(DeployRequest))
async def deploy(
    name: PolicyName, request: Request, caller: AdminCaller, db: DatabaseDep, body: JsonBody
) -> DeploymentView:
    """A version for everybody, or with `share` for some. Adapters: nothing is reloaded; running replies end on theirs.
    Full weights: new requests wait until an engine has them."""
    asked = parse_body(DeployRequest, body)
    actor, reason = caller.key_prefix, asked.reason
    if asked.share is not None:
        service.refuse_beside(settings_of(request), "A canary")
    async with db.write() as session:
        policy = await service.named(session, caller.project_id, name)
        if asked.share is None:
            await deployment_service.deploy(session, policy, asked.version, actor=actor, reason=reason)
        else:
            await deployment_service.locked(session, policy)
            version = await deployment_service.heard(session, policy, asked.version)
            await deployment_service.begin_canary(
                session, policy, version, asked.share, watched=asked.watch, actor=actor, reason=reason
            )
    return await _moved(name, request, caller.project_id, db)


@router.post("/canary/promote", openapi_extra=request_body_schema(Reason))
async def promote(
    name: PolicyName, request: Request, caller: AdminCaller, db: DatabaseDep, body: JsonBody
) -> DeploymentView:
    """The canary for everybody. 409 when none is out."""
    asked = parse_body(Reason, body)
    async with db.write() as session:
        policy = await service.named(session, caller.project_id, name)
        deployment = await deployment_service.locked(session, policy)
        if deployment.canary_version_id is None:
            raise _none_out(policy)
        version = await repository.version(session, deployment.canary_version_id)
        await deployment_service.deploy(session, policy, version.number, actor=caller.key_prefix, reason=asked.reason)
    return await _moved(name, request, caller.project_id, db)


@router.post("/canary/abort", openapi_extra=request_body_schema(Reason))
async def end(
    name: PolicyName, request: Request, caller: AdminCaller, db: DatabaseDep, body: JsonBody
) -> DeploymentView:
    """Everybody back on what serves. 409 when no canary is out."""
    asked = parse_body(Reason, body)
    async with db.write() as session:
        policy = await service.named(session, caller.project_id, name)
        await deployment_service.locked(session, policy)
        if await deployment_service.end_canary(session, policy, actor=caller.key_prefix, reason=asked.reason) is None:
            raise _none_out(policy)
    return await _moved(name, request, caller.project_id, db)


@router.post("/shadow/promote", openapi_extra=request_body_schema(Reason))
async def promote_shadow(
    name: PolicyName, request: Request, caller: AdminCaller, db: DatabaseDep, body: JsonBody
) -> DeploymentView:
    """It has shown enough: it goes out as new versions do, to a canary's share or to all. 409 when there is none."""
    asked = parse_body(Reason, body)
    async with db.write() as session:
        policy, version = await _shadow_version(session, caller.project_id, name)
        shadow.passed(session, policy, version, actor=caller.key_prefix, reason=asked.reason)
    return await _moved(name, request, caller.project_id, db)


@router.post("/shadow/abort", openapi_extra=request_body_schema(Reason))
async def end_shadow(
    name: PolicyName, request: Request, caller: AdminCaller, db: DatabaseDep, body: JsonBody
) -> DeploymentView:
    """The version is rejected, and learning goes back to what serves. 409 when there is none."""
    asked = parse_body(Reason, body)
    async with db.write() as session:
        policy, version = await _shadow_version(session, caller.project_id, name)
        reason = asked.reason or ENDED
        await deployment_service.reject(session, policy, version, actor=caller.key_prefix, reason=reason)
    return await _moved(name, request, caller.project_id, db)


@router.put("/delivery", openapi_extra=request_body_schema(DeliveryRequest))
async def put_delivery(
    name: PolicyName, request: Request, caller: AdminCaller, db: DatabaseDep, body: JsonBody
) -> DeploymentView:
    """From the next request and the next version on. A canary that is out stays as it is; a shadow deployment goes on, and is
    held to what is set now."""
    asked = parse_body(DeliveryRequest, body)
    if asked.canary is not None:
        service.refuse_beside(settings_of(request), "A canary")
    if asked.shadow is not None:
        service.refuse_beside(settings_of(request), "A shadow")
    if asked.conversations == ConversationRouting.STICKY:
        service.refuse_beside(settings_of(request), "A conversation that stays on its version")
    async with db.write() as session:
        policy = await service.named(session, caller.project_id, name)
        await deployment_service.locked(session, policy)
        if asked.shadow is not None and (told := idle(asked.shadow, rewards_of(policy, settings_of(request)))):
            raise BadRequest(f"No version could run in shadow: {told}.", param="shadow")
        policy.conversations = asked.conversations
        own = None if asked.canary is None else asked.canary.model_dump(mode="json")
        policy.canary = null() if own is None else own  # None would be kept as JSON's
        shadow_config = None if asked.shadow is None else asked.shadow.model_dump(mode="json")
        policy.shadow = null() if shadow_config is None else shadow_config
        record_audit(
            session,
            caller.key_prefix,
            "set delivery",
            policy.name,
            project_id=policy.project_id,
            conversations=asked.conversations,
            canary=own,
            shadow=shadow_config,
        )
    return await _moved(name, request, caller.project_id, db)


async def _moved(name: str, request: Request, project_id: str, db: DatabaseDep) -> DeploymentView:
    services_of(request).get(VersionRouter).forget()
    async with db.read() as session:
        return await _view(session, await service.named(session, project_id, name), settings_of(request))


async def _view(session: AsyncSession, policy: Policy, settings: Settings) -> DeploymentView:
    deployment = await repository.deployment_of(session, policy.id)
    serving = service.label(policy, await repository.version(session, deployment.version_id))
    previous = deployment.previous_version_id
    config = canary_metrics.config_of(policy, settings)
    return DeploymentView(
        policy=policy.name,
        serving=serving,
        previous=service.label(policy, await repository.version(session, previous)) if previous else None,
        canary=await _canary(session, policy, deployment, config or CanaryConfig(), serving),
        shadow=await _shadow(session, policy, deployment, settings, serving),
        epoch=deployment.epoch,
        changed_at=deployment.changed_at,
        conversations=policy.conversations,
        own_canary=policy.canary is not None,
        canary_config=config,
        own_shadow=policy.shadow is not None,
        shadow_config=shadow.config_of(policy, settings),
    )


async def _canary(
    session: AsyncSession, policy: Policy, deployment: Deployment, config: CanaryConfig, serving: str
) -> CanaryView | None:
    if deployment.canary_version_id is None or deployment.canary_since is None:
        return None
    version = await repository.version(session, deployment.canary_version_id)
    candidate, stable, verdict = await canary_metrics.judged(session, deployment, config)
    return CanaryView.of(
        share=deployment.canary_share,
        since=deployment.canary_since,
        until=deployment.canary_since + config.patience_seconds,
        watched=deployment.canary_watched,
        candidate=ArmView.of(service.label(policy, version), candidate),
        stable=ArmView.of(serving, stable),
        verdict=verdict,
    )


async def _shadow(
    session: AsyncSession, policy: Policy, deployment: Deployment, settings: Settings, serving: str
) -> ShadowView | None:
    version = await shadow.under_way(session, policy.id)
    if version is None or version.shadow_since is None:
        return None
    config, rewards = shadow.kept(policy, settings), rewards_of(policy, settings)
    candidate, stable, counted, verdict = await shadow_metrics.judged(
        session, version, deployment.version_id, config, rewards
    )
    return ShadowView.of(
        share=config.share,
        since=version.shadow_since,
        candidate=ArmView.of(service.label(policy, version), candidate),
        stable=ArmView.of(serving, stable),
        pairs=counted,
        idle=idle(config, rewards),
        verdict=verdict,
    )


async def _shadow_version(session: AsyncSession, project_id: str, name: str) -> tuple[Policy, Version]:
    """With the policy's lock. Raises Conflict where none is."""
    policy = await service.named(session, project_id, name)
    await deployment_service.locked(session, policy)
    version = await shadow.under_way(session, policy.id)
    if version is None:
        raise Conflict(f"No version of '{policy.name}' is in shadow.", code="no_shadow")
    return policy, version


def _none_out(policy: Policy) -> Conflict:
    return Conflict(f"No canary of '{policy.name}' is out.", code="no_canary")
