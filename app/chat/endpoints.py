"""/v1/chat/completions and /v1/models."""

from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Annotated, Any, Literal

import orjson
from fastapi import APIRouter, Path, Request
from pydantic import BaseModel
from starlette.responses import Response, StreamingResponse

from app.chat import schemas, service
from app.core.errors import ERROR_RESPONSES, AttuneError
from app.core.http import EVENT_STREAM, json_body, json_response
from app.deployments.resolution import resolve_model
from app.policies import references
from app.policies import repository as policies
from app.policies import service as policy_service
from app.projects.auth import ChatCaller, DatabaseDep

router = APIRouter(prefix="/v1", tags=["chat"], responses=ERROR_RESPONSES)
RESPONSES: dict[int | str, dict[str, Any]] = {
    200: {"content": EVENT_STREAM, "description": "a completion, or a stream of chunks"}
}
ModelName = Annotated[str, Path(min_length=1, max_length=128)]


class ModelView(BaseModel):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "attune"


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[ModelView]


@router.post("/chat/completions", response_model=schemas.CompletionView, responses=RESPONSES)
async def chat(
    request: Request,
    caller: ChatCaller,
    body: Annotated[schemas.ChatRequest, json_body(schemas.ChatRequest, parse=schemas.parse_chat_request)],
) -> Response:
    """Answer a chat, as OpenAI's chat completions do. Every completion is stored and can be given feedback."""
    if not body.stream:
        reply = await service.complete(request, caller, body)
        return json_response(reply.content, headers=reply.headers)
    streamed = await service.stream(request, caller, body)
    return event_stream(server_sent_events(streamed.content), streamed.headers)


def event_stream(events: AsyncIterator[bytes], headers: dict[str, str]) -> Response:
    """Return a response of server-sent events that no proxy may buffer."""
    headers = {**headers, "cache-control": "no-cache", "x-accel-buffering": "no"}
    return StreamingResponse(events, headers=headers, media_type="text/event-stream")


async def server_sent_events(chunks: service.Chunks) -> AsyncIterator[bytes]:
    """Yield server-sent events. A reply that breaks off ends with an error event, which OpenAI's clients raise."""
    async with aclosing(chunks):
        try:
            async for chunk in chunks:
                yield b"data: " + orjson.dumps(chunk) + b"\n\n"
        except AttuneError as error:
            yield b"data: " + orjson.dumps(error.body()) + b"\n\n"
    yield b"data: [DONE]\n\n"


@router.get("/models")
async def list_models(caller: ChatCaller, db: DatabaseDep) -> ModelList:
    """List the policies, then each version that an engine holds and a request can name."""
    async with db.read() as session:
        rows = await policies.list_policies(session, caller.project_id)
        versions = await policy_service.list_loaded_versions(session, caller.project_id)
    policy_views = [ModelView(id=row.name, created=int(row.created_at)) for row in rows]
    version_views = [
        ModelView(id=references.version_name(policy, version), created=int(version.created_at))
        for policy, version in versions
    ]
    return ModelList(data=policy_views + version_views)


@router.get("/models/{name}")
async def get_model(name: ModelName, caller: ChatCaller, db: DatabaseDep) -> ModelView:
    """Return one model: a policy (`assistant`) or a version (`assistant@v12`, `assistant@previous`)."""
    version = await db.run_read(lambda connection: resolve_model(connection, caller.project_id, name))
    return ModelView(id=name, created=int(version.created_at))
