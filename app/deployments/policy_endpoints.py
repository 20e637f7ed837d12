"""/v1/policies: create policies, read and change their settings.

It is beside the deployments, because a change may be one of what serves whom, and drops the cached routes.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from pydantic import BaseModel, Field, StringConstraints

from app.core.errors import ERROR_RESPONSES
from app.core.http import json_body, services_of, settings_of
from app.deployments import policy_states, traffic
from app.deployments.policy_details import PolicyDetails, view_details
from app.deployments.version_router import VersionRouter
from app.engines.adaptation import adaptation_of
from app.policies import lifecycle
from app.policies.context import OperatedPolicyDep, PolicyContext, PolicyDep, Reason, ReasonBody, ViewedPolicyDep
from app.policies.locks import LockedPolicy
from app.policies.service import Attribution
from app.policies.views import TrafficView
from app.projects.auth import AdminCaller, DatabaseDep, limits_of
from app.projects.idempotency import IdempotentRoute

router = APIRouter(prefix="/v1/policies", tags=["policies"], route_class=IdempotentRoute, responses=ERROR_RESPONSES)
NewName = Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9_-]{0,62}$")]
OwnSettings = Annotated[
    dict[str, Any],
    Field(
        description="the policy's own values, with the sections and names of attune.toml: algorithm, trainer, rewards, "
        'rollouts, release. Example: {"algorithm": "grpo", "trainer": {"batch_size": 16}}'
    ),
]


class PolicyRequest(Reason):
    name: NewName
    settings: OwnSettings = Field(default_factory=dict)
    traffic: TrafficView | None = Field(None, description="besides the requests that name it; null: none")


class PolicyChange(Reason):
    settings: OwnSettings = Field(default_factory=dict, description="as above; null returns to the deployment's value")
    traffic: TrafficView | None = Field(None, description="as above; it stays as it is where it is not given")


class PolicyDeleted(BaseModel):
    object: Literal["policy.deleted"] = "policy.deleted"
    id: str
    name: str
    deleted: Literal[True] = True


@router.post("", status_code=201)
async def create_policy(
    request: Request, caller: AdminCaller, db: DatabaseDep, body: Annotated[PolicyRequest, json_body(PolicyRequest)]
) -> PolicyDetails:
    """Create a policy over the same base model. Its version 0 answers at once, and it learns from its own traffic."""
    settings, by = settings_of(request), Attribution(caller.key_prefix, body.reason)
    adaptation_of(settings).require_several_versions("Another policy")
    limit = limits_of(request, caller).policies
    async with db.write() as session:
        locked = await lifecycle.create(session, caller.project_id, body.name, body.settings, by, settings, limit=limit)
        if body.traffic is not None:
            await traffic.set_traffic(locked, body.traffic.from_, body.traffic.share, by)
        view = await view_details(session, locked.policy, settings)
    services_of(request).get(VersionRouter).forget()  # which may know that there is no such policy
    return view


@router.get("/{name}")
async def get_policy(context: ViewedPolicyDep) -> PolicyDetails:
    """Return a policy with the versions that serve, its mode of learning, and its settings."""
    async with context.read() as (session, policy):
        return await view_details(session, policy, context.settings)


@router.patch("/{name}")
async def change_policy(context: PolicyDep, body: Annotated[PolicyChange, json_body(PolicyChange)]) -> PolicyDetails:
    """Change the policy's own settings, which hold for its next batch, update and release, or its traffic."""
    by = context.attribute(body.reason)
    async with _change(context) as locked:
        await lifecycle.change_settings(locked, body.settings, by, context.settings)
        if body.traffic is not None:
            await traffic.set_traffic(locked, body.traffic.from_, body.traffic.share, by)
        elif "traffic" in body.model_fields_set:
            traffic.clear_traffic(locked, by)
        return await view_details(*locked, context.settings)


@router.post("/{name}/pause")
async def pause_policy(context: OperatedPolicyDep, body: ReasonBody) -> PolicyDetails:
    """Stop training the policy; it still answers chats. An update under way is finished."""
    async with _change(context) as locked:
        await policy_states.pause(locked, context.attribute(body.reason))
        return await view_details(*locked, context.settings)


@router.post("/{name}/resume")
async def resume_policy(context: OperatedPolicyDep, body: ReasonBody) -> PolicyDetails:
    """Train a paused policy again, with the samples that have come meanwhile."""
    async with _change(context) as locked:
        await policy_states.resume(locked, context.attribute(body.reason))
        return await view_details(*locked, context.settings)


@router.post("/{name}/archive")
async def archive_policy(context: PolicyDep, body: ReasonBody) -> PolicyDetails:
    """Let the policy answer no chats any more, and keep its versions and their files. 409 for the default policy."""
    async with _change(context) as locked:
        await policy_states.archive(locked, context.attribute(body.reason), context.settings)
        return await view_details(*locked, context.settings)


@router.post("/{name}/unarchive")
async def unarchive_policy(context: PolicyDep, body: ReasonBody) -> PolicyDetails:
    """Bring an archived policy back: it answers chats as soon as an engine has loaded what serves."""
    async with _change(context) as locked:
        await policy_states.unarchive(locked, context.attribute(body.reason))
        return await view_details(*locked, context.settings)


@router.delete("/{name}")
async def delete_policy(context: PolicyDep) -> PolicyDeleted:
    """Delete an archived policy for good, with the files of its versions. 409 for one that is not archived."""
    async with _change(context) as locked:
        await policy_states.delete_policy(locked, context.attribute(None), context.settings)
        return PolicyDeleted(id=locked.policy.id, name=context.name)


@asynccontextmanager
async def _change(context: PolicyContext) -> AsyncIterator[LockedPolicy]:
    """Open a write transaction with the policy locked, and drop the cached routes after its commit."""
    try:
        async with context.write() as locked:
            yield locked
    finally:
        services_of(context.request).get(VersionRouter).forget()
