"""POST /v1/responses."""

import logging
import time
from collections.abc import AsyncIterator
from typing import Any

import anyio
import orjson
from fastapi import APIRouter, Request
from starlette.responses import Response, StreamingResponse

from app.chat import schemas as chat
from app.chat import service
from app.core.errors import DOCUMENTED, AttuneError
from app.core.http import JsonBody, request_body_schema
from app.projects.auth import ChatCaller
from app.responses import request as response_request
from app.responses import schemas
from app.responses.events import Telling
from app.responses.rendering import Rendering, render
from app.responses.stream_state import Event

log = logging.getLogger("attune.responses")
router = APIRouter(prefix="/v1", tags=["chat"], responses=DOCUMENTED)
BOTH_WAYS: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "whole, or as it comes",
        "content": {
            "application/json": {"schema": {"type": "object"}},
            "text/event-stream": {"schema": {"type": "string"}},
        },
    }
}


@router.post("/responses", responses=BOTH_WAYS, openapi_extra=request_body_schema(schemas.ResponsesRequest))
async def respond(request: Request, caller: ChatCaller, body: JsonBody) -> Response:
    asked = schemas.read(body)
    question = chat.read(response_request.chat_body(asked))
    if not asked.stream:
        reply = await service.whole(request, caller, question)
        return Response(orjson.dumps(render(asked, reply.body)), headers=reply.headers, media_type="application/json")
    streamed = await service.stream(request, caller, question)
    rendering = Rendering(
        asked, streamed.headers["x-completion-id"], streamed.headers["x-policy-version"], int(time.time())
    )
    happening = events(streamed, rendering)
    await anext(happening)
    headers = {**streamed.headers, "cache-control": "no-cache", "x-accel-buffering": "no"}
    return StreamingResponse(happening, headers=headers, media_type="text/event-stream")


async def events(streamed: service.Streamed, rendering: Rendering) -> AsyncIterator[bytes]:
    """However this ends, the chat is left, which records the turn and ends the engine's work. The first item is empty:
    a generator that was never begun could not be left."""
    chunks, telling = streamed.chunks, Telling(rendering)
    try:
        chunk = await anext(chunks, None)
        yield b""
        try:
            yield told(telling.begin())
            while chunk is not None:
                yield told(telling.hear(chunk))
                chunk = await anext(chunks, None)
            yield told(telling.end())
        except AttuneError as error:
            log.warning("%s broke off: %s", streamed.headers["x-completion-id"], error)
            yield told(telling.fail(error.message))
    finally:
        with anyio.CancelScope(shield=True):
            await chunks.aclose()


def told(happened: list[Event]) -> bytes:
    return b"".join(
        b"event: " + event["type"].encode() + b"\ndata: " + orjson.dumps(event) + b"\n\n" for event in happened
    )
