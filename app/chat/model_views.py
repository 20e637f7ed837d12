"""The models that a request can name, as OpenAI's clients read them, or Anthropic's."""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Literal

from pydantic import BaseModel
from sqlalchemy.ext.asyncio import AsyncSession
from starlette.responses import Response

from app.core.http import json_response
from app.policies import repository as policies
from app.policies import service as policy_service
from app.policies.references import version_name

ANTHROPIC_HEADER = "anthropic-version"


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


async def view_models(session: AsyncSession, project_id: str) -> list[ModelView]:
    """Return the policies, then each version that an engine holds and a request can name."""
    rows = await policies.list_policies(session, project_id)
    versions = await policy_service.list_loaded_versions(session, project_id)
    return [
        *(ModelView(id=row.name, created=int(row.created_at)) for row in rows),
        *(ModelView(id=version_name(policy, version), created=int(version.created_at)) for policy, version in versions),
    ]


def wants_anthropic(headers: Mapping[str, str]) -> bool:
    """Whether the client reads Anthropic's form."""
    return ANTHROPIC_HEADER in headers


def render_models(views: Sequence[ModelView], headers: Mapping[str, str]) -> ModelList | Response:
    """Return the list in the form that the client reads. Anthropic's has one page."""
    if not wants_anthropic(headers):
        return ModelList(data=list(views))
    ends = {"first_id": views[0].id, "last_id": views[-1].id} if views else {"first_id": None, "last_id": None}
    return json_response({"data": [view.to_anthropic() for view in views], "has_more": False, **ends})
