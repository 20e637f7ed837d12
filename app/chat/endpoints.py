"""/v1/chat/completions and /v1/models."""

from typing import Any

import orjson
from fastapi import APIRouter, Request
from starlette.responses import Response, StreamingResponse

from app.auth import ChatCaller, DatabaseDep
from app.body import JsonBody
from app.chat import relay, repository, schemas, service
from app.config import Settings
from app.engine.pool import EnginePool
from app.errors import NotFound
from app.policies import repository as policies
from app.policies import service as policy_service

router = APIRouter(prefix="/v1", tags=["chat"])


@router.post("/chat/completions")
async def chat(request: Request, caller: ChatCaller, db: DatabaseDep, body: JsonBody) -> Response:
    asked = schemas.read(body)
    settings: Settings = request.app.state.settings
    pool: EnginePool = request.app.state.engines
    async with db.write() as session:
        turn = await service.open_turn(session, caller.project_id, asked, settings)
    client = pool.at(turn.engine_url)
    if not asked.stream:
        reply = await relay.whole(db, client, turn, request)
        return Response(orjson.dumps(reply), headers=turn.headers, media_type="application/json")
    events = relay.events(db, client, turn)
    await anext(events)  # an engine that is down or refuses answers with a status, not with a broken stream
    headers = {**turn.headers, "cache-control": "no-cache", "x-accel-buffering": "no"}
    return StreamingResponse(events, headers=headers, media_type="text/event-stream")


@router.get("/chat/completions/{completion_id}")
async def stored(completion_id: str, caller: ChatCaller, db: DatabaseDep) -> Response:
    async with db.read() as session:
        found = await repository.turn(session, caller.project_id, completion_id)
    if found is None:
        raise NotFound(f"There is no completion '{completion_id}'.", param="completion_id")
    turn, policy, version = found
    label = policy_service.label(policy, version)
    choice = {"index": 0, "message": turn.reply, "logprobs": None, "finish_reason": turn.finish_reason}
    body = {
        "id": turn.id,
        "object": "chat.completion",
        "created": int(turn.created_at),
        "model": label,
        "choices": [choice] if turn.reply is not None else [],
        "usage": {
            "prompt_tokens": turn.num_prompt_tokens or 0,
            "completion_tokens": turn.num_output_tokens or 0,
            "total_tokens": (turn.num_prompt_tokens or 0) + (turn.num_output_tokens or 0),
        },
    }
    headers = {"x-completion-id": turn.id, "x-policy-version": label}
    return Response(orjson.dumps(body), headers=headers, media_type="application/json")


@router.get("/models")
async def list_models(caller: ChatCaller, db: DatabaseDep) -> dict[str, Any]:
    async with db.read() as session:
        rows = await policies.policies_of(session, caller.project_id)
    return {"object": "list", "data": [model(row.name, int(row.created_at)) for row in rows]}


@router.get("/models/{name}")
async def get_model(name: str, caller: ChatCaller, db: DatabaseDep) -> dict[str, Any]:
    async with db.read() as session:
        policy, version = await policy_service.resolve(session, caller.project_id, name)
    return model(name, int(version.created_at if "@" in name else policy.created_at))


def model(name: str, created: int) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": created, "owned_by": "attune"}
