"""/v1/models: the policies and versions that a request can name, as OpenAI's clients read them, or Anthropic's."""

from typing import Annotated

from fastapi import APIRouter, Path, Request
from starlette.responses import Response

from app.chat.model_views import ModelList, ModelView, render_models, view_models, wants_anthropic
from app.core.errors import ERROR_RESPONSES
from app.core.http import json_response
from app.deployments.routes import resolve_model
from app.projects.auth import ChatCaller, DatabaseDep
from app.projects.episode_keys import takes_episode_keys

router = APIRouter(prefix="/v1/models", tags=["chat"], responses=ERROR_RESPONSES)
ModelName = Annotated[str, Path(min_length=1, max_length=128)]


@router.get("", response_model=ModelList)
@takes_episode_keys
async def list_models(request: Request, caller: ChatCaller, db: DatabaseDep) -> ModelList | Response:
    """List the policies, then each version that an engine holds and a request can name.

    With the header `anthropic-version`, the list has Anthropic's form, in one page.
    """
    async with db.read() as session:
        views = await view_models(session, caller.project_id)
    return render_models(views, request.headers)


@router.get("/{name}", response_model=ModelView)
@takes_episode_keys
async def get_model(request: Request, name: ModelName, caller: ChatCaller, db: DatabaseDep) -> ModelView | Response:
    """Return one model: a policy (`assistant`) or a version (`assistant@v12`, `assistant@previous`).

    With the header `anthropic-version`, it has Anthropic's form.
    """
    version = await db.run_read(lambda connection: resolve_model(connection, caller.project_id, name))
    view = ModelView(id=name, created=int(version.created_at))
    return json_response(view.to_anthropic()) if wants_anthropic(request.headers) else view
