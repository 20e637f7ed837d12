"""/v1/chat/completions and /v1/models."""

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Annotated, Any, Literal

import orjson
from fastapi import APIRouter, Path, Request
from pydantic import BaseModel
from starlette.responses import Response, StreamingResponse

from app.chat import schemas, service
from app.chat.views import CompletionView
from app.core.errors import DOCUMENTED, AttuneError
from app.core.http import JsonBody, request_body_schema
from app.deployments.resolution import resolve
from app.policies import repository as policies
from app.policies import service as policy_service
from app.projects.auth import ChatCaller, DatabaseDep

router = APIRouter(prefix="/v1", tags=["chat"], responses=DOCUMENTED)
EVENTS: dict[int | str, dict[str, Any]] = {
    200: {"content": {"text/event-stream": {"schema": {"type": "string"}}}, "description": "whole, or as it comes"}
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


@router.post(
    "/chat/completions",
    response_model=CompletionView,
    responses=EVENTS,
    openapi_extra=request_body_schema(schemas.ChatRequest),
)
async def chat(request: Request, caller: ChatCaller, body: JsonBody) -> Response:
    asked = schemas.read(body)
    if not asked.stream:
        reply = await service.whole(request, caller, asked)
        return Response(orjson.dumps(reply.body), headers=reply.headers, media_type="application/json")
    streamed = await service.stream(request, caller, asked)
    headers = {**streamed.headers, "cache-control": "no-cache", "x-accel-buffering": "no"}
    return StreamingResponse(events(streamed.chunks), headers=headers, media_type="text/event-stream")


async def events(chunks: AsyncGenerator[dict[str, Any], None]) -> AsyncIterator[bytes]:
    """Server-sent events; a reply that breaks off ends with an error that stock clients raise."""
    async with aclosing(chunks):
        try:
            async for chunk in chunks:
                yield b"data: " + orjson.dumps(chunk) + b"\n\n"
        except AttuneError as error:
            yield b"data: " + orjson.dumps(error.body()) + b"\n\n"
    yield b"data: [DONE]\n\n"


@router.get("/models")
async def list_models(caller: ChatCaller, db: DatabaseDep) -> ModelList:
    """The policies, then each version that can be asked for now."""
    async with db.read() as session:
        rows = await policies.policies_of(session, caller.project_id)
        versions = await policy_service.askable(session, caller.project_id)
    named = [ModelView(id=row.name, created=int(row.created_at)) for row in rows]
    numbered = [
        ModelView(id=policy_service.label(policy, version), created=int(version.created_at))
        for policy, version in versions
    ]
    return ModelList(data=named + numbered)


@router.get("/models/{name}")
async def get_model(name: ModelName, caller: ChatCaller, db: DatabaseDep) -> ModelView:
    named = await db.run_read(lambda connection: resolve(connection, caller.project_id, name))
    return ModelView(id=name, created=int(named.created_at))
