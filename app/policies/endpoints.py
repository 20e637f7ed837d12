"""/v1/policies: policies and their versions."""

from typing import Any

from fastapi import APIRouter
from sqlalchemy.ext.asyncio import AsyncSession

from app.core.errors import ERROR_RESPONSES
from app.models import Policy
from app.policies import ancestry, repository, service
from app.policies.references import PolicyName, version_name
from app.policies.schemas import PolicyView, VersionView
from app.projects.auth import AdminCaller, DatabaseDep

router = APIRouter(prefix="/v1/policies", tags=["policies"], responses=ERROR_RESPONSES)


@router.get("")
async def list_policies(caller: AdminCaller, db: DatabaseDep) -> dict[str, Any]:
    """Return every policy of the project, by name."""
    async with db.read() as session:
        policies = await repository.list_policies(session, caller.project_id)
        views = [await view_policy(session, policy) for policy in policies]
    return {"object": "list", "data": views}


@router.get("/{name}")
async def get_policy(name: PolicyName, caller: AdminCaller, db: DatabaseDep) -> PolicyView:
    """Return a policy with the versions that serve, and its mode of learning."""
    async with db.read() as session:
        return await view_policy(session, await service.get_policy(session, caller.project_id, name))


@router.get("/{name}/versions")
async def list_versions(name: PolicyName, caller: AdminCaller, db: DatabaseDep) -> dict[str, Any]:
    """Return every version of a policy with its statistics, by number."""
    async with db.read() as session:
        policy = await service.get_policy(session, caller.project_id, name)
        serving_id = (await repository.get_deployment(session, policy.id)).version_id
        versions = await repository.list_versions(session, policy.id)
        stats = await repository.version_stats(session, policy.id)
        delays = await repository.alignment_delays(session, policy.id)
    numbers = {version.id: version.number for version in versions}
    tainted = ancestry.tainted_since(versions)
    views = [
        VersionView.of(
            policy,
            version,
            serving=version.id == serving_id,
            parent=numbers.get(version.parent_id or ""),
            stats=stats.get(version.id, {}),
            delay=delays.get(version.id),
            tainted_at=tainted.get(version.id),
            untainted_ancestor=ancestry.last_untainted_ancestor(version, versions, tainted),
        )
        for version in versions
    ]
    return {"object": "list", "data": views}


async def view_policy(session: AsyncSession, policy: Policy) -> PolicyView:
    """Return the policy as the API shows it."""
    deployment = await repository.get_deployment(session, policy.id)
    serving = await repository.get_version(session, deployment.version_id)
    head = await repository.get_version(session, policy.head_version_id or serving.id)
    shadow = await repository.find_shadow_version(session, policy.id)
    untainted = await ancestry.find_untainted_ancestor(session, policy.id, serving)

    async def name_of(version_id: str | None) -> str | None:
        return version_name(policy, await repository.get_version(session, version_id)) if version_id else None

    return PolicyView(
        id=policy.id,
        name=policy.name,
        base_model=policy.base_model,
        serving=version_name(policy, serving),
        previous=await name_of(deployment.previous_version_id),
        canary=await name_of(deployment.canary_version_id),
        canary_share=deployment.canary_share,
        shadow=version_name(policy, shadow) if shadow else None,
        head=version_name(policy, head),
        epoch=deployment.epoch,
        created_at=policy.created_at,
        mode=policy.mode,
        mode_reason=policy.mode_reason,
        mode_since=policy.mode_since,
        kl_alarms=policy.kl_alarms,
        untainted_ancestor=version_name(policy, untainted) if untainted else None,
    )
