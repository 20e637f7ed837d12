"""POST /v1/responses."""

import logging
import time
from collections.abc import AsyncIterator
from typing import Annotated, Any

import anyio
import orjson
from fastapi import APIRouter, Request
from starlette.responses import Response, StreamingResponse

from app.chat import schemas as chat
from app.chat import service
from app.core.errors import ERROR_RESPONSES, AttuneError
from app.core.http import json_body
from app.projects.auth import ChatCaller
from app.responses import request as response_request
from app.responses import schemas
from app.responses.events import ResponseEvents
from app.responses.rendering import ResponseRenderer, render_response
from app.responses.stream_state import Event

log = logging.getLogger("attune.responses")
router = APIRouter(prefix="/v1", tags=["chat"], responses=ERROR_RESPONSES)
RESPONSES: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "a response object, or a stream of events",
        "content": {
            "application/json": {"schema": {"type": "object"}},
            "text/event-stream": {"schema": {"type": "string"}},
        },
    }
}


@router.post("/responses", responses=RESPONSES)
async def create_response(
    request: Request,
    caller: ChatCaller,
    body: Annotated[
        schemas.ResponsesRequest, json_body(schemas.ResponsesRequest, parse=schemas.parse_responses_request)
    ],
) -> Response:
    """Answer a request of OpenAI's Responses API. Responses are stateless: `input` holds the whole conversation."""
    chat_request = chat.parse_chat_request(response_request.to_chat_body(body))
    if not body.stream:
        completed = await service.complete(request, caller, chat_request)
        return Response(
            orjson.dumps(render_response(body, completed.body)),
            headers=completed.headers,
            media_type="application/json",
        )
    reply = await service.stream(request, caller, chat_request)
    renderer = ResponseRenderer(
        body, reply.headers["x-completion-id"], reply.headers["x-policy-version"], int(time.time())
    )
    encoded_events = server_sent_events(reply, renderer)
    await anext(encoded_events)
    headers = {**reply.headers, "cache-control": "no-cache", "x-accel-buffering": "no"}
    return StreamingResponse(encoded_events, headers=headers, media_type="text/event-stream")


async def server_sent_events(reply: service.StreamingReply, renderer: ResponseRenderer) -> AsyncIterator[bytes]:
    """Yield one empty item, then the encoded events.

    However it ends, the chat stream is closed, which records the turn and ends the engine's work. The empty item enters
    the generator: one that was never entered would not run its clean-up.
    """
    chunks, response_events = reply.chunks, ResponseEvents(renderer)
    try:
        chunk = await anext(chunks, None)
        yield b""
        try:
            yield encode_events(response_events.start())
            while chunk is not None:
                yield encode_events(response_events.add_chunk(chunk))
                chunk = await anext(chunks, None)
            yield encode_events(response_events.finish())
        except AttuneError as error:
            log.warning("response %s failed: %s", reply.headers["x-completion-id"], error)
            yield encode_events(response_events.fail(error.message))
    finally:
        with anyio.CancelScope(shield=True):
            await chunks.aclose()


def encode_events(events: list[Event]) -> bytes:
    return b"".join(
        b"event: " + event["type"].encode() + b"\ndata: " + orjson.dumps(event) + b"\n\n" for event in events
    )
