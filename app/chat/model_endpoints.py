"""/v1/models: the policies and versions that a request can name, as OpenAI's clients read them, or Anthropic's."""

from datetime import UTC, datetime
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Path, Request
from pydantic import BaseModel
from starlette.responses import Response

from app.core.errors import ERROR_RESPONSES
from app.core.http import json_response
from app.deployments.version_router import resolve_model
from app.policies import repository as policies
from app.policies import service as policy_service
from app.policies.references import version_name
from app.projects.auth import ChatCaller, DatabaseDep
from app.projects.episode_keys import takes_episode_keys

router = APIRouter(prefix="/v1/models", tags=["chat"], responses=ERROR_RESPONSES)
ANTHROPIC_HEADER = "anthropic-version"
ModelName = Annotated[str, Path(min_length=1, max_length=128)]


class ModelView(BaseModel):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "attune"

    def to_anthropic(self) -> dict[str, Any]:
        created_at = datetime.fromtimestamp(self.created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        return {"type": "model", "id": self.id, "display_name": self.id, "created_at": created_at}


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[ModelView]


@router.get("", response_model=ModelList)
@takes_episode_keys
async def list_models(request: Request, caller: ChatCaller, db: DatabaseDep) -> ModelList | Response:
    """List the policies, then each version that an engine holds and a request can name.

    With the header `anthropic-version`, the list has Anthropic's form, in one page.
    """
    async with db.read() as session:
        rows = await policies.list_policies(session, caller.project_id)
        versions = await policy_service.list_loaded_versions(session, caller.project_id)
    policy_views = [ModelView(id=row.name, created=int(row.created_at)) for row in rows]
    version_views = [
        ModelView(id=version_name(policy, version), created=int(version.created_at)) for policy, version in versions
    ]
    views = policy_views + version_views
    if ANTHROPIC_HEADER not in request.headers:
        return ModelList(data=views)
    ends = {"first_id": views[0].id, "last_id": views[-1].id} if views else {"first_id": None, "last_id": None}
    return json_response({"data": [view.to_anthropic() for view in views], "has_more": False, **ends})


@router.get("/{name}", response_model=ModelView)
@takes_episode_keys
async def get_model(request: Request, name: ModelName, caller: ChatCaller, db: DatabaseDep) -> ModelView | Response:
    """Return one model: a policy (`assistant`) or a version (`assistant@v12`, `assistant@previous`).

    With the header `anthropic-version`, it has Anthropic's form.
    """
    version = await db.run_read(lambda connection: resolve_model(connection, caller.project_id, name))
    view = ModelView(id=name, created=int(version.created_at))
    return json_response(view.to_anthropic()) if ANTHROPIC_HEADER in request.headers else view
