"""/v1/policies: policies and their versions; /v1/versions/compare: versions side by side."""

from typing import Annotated, Any

from fastapi import APIRouter, Query
from pydantic import Field

from app.core.errors import ERROR_RESPONSES
from app.models import ANSWERING, PolicyState
from app.policies import repository, version_comparison
from app.policies.context import ViewedPolicyDep
from app.policies.version_comparison import MAX_VERSIONS, ComparedVersions
from app.policies.views import view_policy, view_versions
from app.projects.auth import DatabaseDep, ViewingCaller

router = APIRouter(prefix="/v1/policies", tags=["policies"], responses=ERROR_RESPONSES)
version_router = APIRouter(prefix="/v1/versions", tags=["policies"], responses=ERROR_RESPONSES)


@router.get("")
async def list_policies(
    caller: ViewingCaller,
    db: DatabaseDep,
    archived: Annotated[bool, Query(description="also the archived ones")] = False,
) -> dict[str, Any]:
    """Return the policies of the project that answer chats, by name; with `archived` the others, too."""
    states = (*ANSWERING, PolicyState.ARCHIVED) if archived else ANSWERING
    async with db.read() as session:
        policies = await repository.list_policies(session, caller.project_id, states)
        return {"object": "list", "data": [await view_policy(session, policy) for policy in policies]}


@router.get("/{name}/versions")
async def list_versions(
    context: ViewedPolicyDep,
    limit: Annotated[int, Query(ge=1, le=1000)] = 20,
    before: Annotated[int | None, Query(ge=0, le=2**31 - 1, description="a version's number")] = None,
) -> dict[str, Any]:
    """Return the newest versions with their statistics, by number; with `before` those with lower numbers."""
    async with context.read() as (session, policy):
        page = await view_versions(session, policy, limit, before)
    return {"object": "list", "data": page.versions, "has_more": page.has_more}


@version_router.get("/compare")
async def compare_versions(
    caller: ViewingCaller,
    db: DatabaseDep,
    version: Annotated[
        list[Annotated[str, Field(min_length=1, max_length=128)]],
        Query(
            min_length=2,
            max_length=MAX_VERSIONS,
            description="two or more: support@v3, support@3 or support@stable. Each is compared with the first",
        ),
    ],
) -> ComparedVersions:
    """Compare versions by people's votes, rewards and tokens."""
    async with db.read_snapshot() as session:
        return await version_comparison.compare_versions(session, caller.project_id, version)
