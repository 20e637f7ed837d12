"""/v1/policies: list, versions, rollback."""

from typing import Annotated, Any

from fastapi import APIRouter, Path, Request
from sqlalchemy.ext.asyncio import AsyncSession

from app.core.errors import DOCUMENTED
from app.core.http import JsonBody, parse_body, request_body_schema
from app.core.services import services_of
from app.deployments import service as deployment_service
from app.deployments import shadow
from app.deployments.router import VersionRouter
from app.models import Policy
from app.policies import repository, service, taint
from app.policies.schemas import PolicyView, RollbackRequest, RollbackResult, VersionView
from app.projects.auth import AdminCaller, DatabaseDep

PolicyName = Annotated[str, Path(min_length=1, max_length=128)]
router = APIRouter(prefix="/v1/policies", tags=["policies"], responses=DOCUMENTED)


@router.get("")
async def list_policies(caller: AdminCaller, db: DatabaseDep) -> dict[str, Any]:
    async with db.read() as session:
        views = [await view(session, policy) for policy in await repository.policies_of(session, caller.project_id)]
    return {"object": "list", "data": views}


@router.get("/{name}")
async def get_policy(name: PolicyName, caller: AdminCaller, db: DatabaseDep) -> PolicyView:
    async with db.read() as session:
        return await view(session, await service.named(session, caller.project_id, name))


@router.get("/{name}/versions")
async def list_versions(name: PolicyName, caller: AdminCaller, db: DatabaseDep) -> dict[str, Any]:
    async with db.read() as session:
        policy = await service.named(session, caller.project_id, name)
        serving = (await repository.deployment_of(session, policy.id)).version_id
        versions = await repository.versions_of(session, policy.id)
        voices = await repository.version_stats(session, policy.id)
        delays = await repository.delays(session, policy.id)
    numbers = {version.id: version.number for version in versions}
    stained = taint.stains(versions)
    views = [
        VersionView.of(
            policy,
            version,
            serving=version.id == serving,
            parent=numbers.get(version.parent_id or ""),
            voice=voices.get(version.id, {}),
            delay=delays.get(version.id),
            erased_at=stained.get(version.id),
            clean=taint.last_clean(version, versions, stained),
        )
        for version in versions
    ]
    return {"object": "list", "data": views}


@router.post("/{name}/rollback", openapi_extra=request_body_schema(RollbackRequest))
async def roll_back(
    name: PolicyName, request: Request, caller: AdminCaller, db: DatabaseDep, body: JsonBody
) -> RollbackResult:
    asked = parse_body(RollbackRequest, body)
    async with db.write() as session:
        policy = await service.named(session, caller.project_id, name)
        left, taken = await deployment_service.roll_back(
            session, policy, asked.version, undo=asked.undo, actor=caller.key_prefix, reason=asked.reason
        )
    services_of(request).get(VersionRouter).forget()
    return RollbackResult(policy=name, left=service.label(policy, left), serving=service.label(policy, taken))


async def view(session: AsyncSession, policy: Policy) -> PolicyView:
    deployment = await repository.deployment_of(session, policy.id)
    serving = await repository.version(session, deployment.version_id)
    head = await repository.version(session, policy.head_version_id or serving.id)
    previous, canary = deployment.previous_version_id, deployment.canary_version_id
    in_shadow = await shadow.under_way(session, policy.id)
    back = await taint.way_back(session, policy.id, serving)
    return PolicyView(
        id=policy.id,
        name=policy.name,
        base_model=policy.base_model,
        serving=service.label(policy, serving),
        previous=service.label(policy, await repository.version(session, previous)) if previous else None,
        canary=service.label(policy, await repository.version(session, canary)) if canary else None,
        canary_share=deployment.canary_share,
        shadow=service.label(policy, in_shadow) if in_shadow else None,
        head=service.label(policy, head),
        epoch=deployment.epoch,
        created_at=policy.created_at,
        mode=policy.mode,
        mode_reason=policy.mode_reason,
        mode_since=policy.mode_since,
        alarms=policy.kl_alarms,
        clean=service.label(policy, back) if back else None,
    )
