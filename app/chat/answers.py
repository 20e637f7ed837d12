"""The HTTP response to a chat: what the routes of chats and those of episodes share."""

from collections.abc import AsyncIterator
from contextlib import aclosing

import orjson
from fastapi import Request
from starlette.responses import Response

from app.chat.request_origin import RequestOrigin, disconnect_of
from app.chat.schemas import ChatRequest
from app.chat.service import ChatService, Chunks
from app.core.errors import AttuneError
from app.core.http import EVENT_STREAM, event_stream, json_response, services_of
from app.projects.auth import Caller

RESPONSES: dict[int | str, dict[str, object]] = {
    200: {"content": EVENT_STREAM, "description": "a completion, or a stream of chunks"}
}


async def answer(request: Request, caller: Caller, chat_request: ChatRequest) -> Response:
    """Answer a chat in OpenAI's form: as a whole, or as a stream of chunks if it asks for one."""
    chats = services_of(request).get(ChatService)
    origin, disconnected = RequestOrigin.of(request), disconnect_of(request)
    if not chat_request.stream:
        reply = await chats.complete(caller, chat_request, origin, disconnected)
        return json_response(reply.content, headers=reply.headers)
    streamed = await chats.stream(caller, chat_request, origin, disconnected)
    return event_stream(server_sent_events(streamed.content), streamed.headers)


async def server_sent_events(chunks: Chunks) -> AsyncIterator[bytes]:
    """Yield server-sent events. A reply that breaks off ends with an error event, which OpenAI's clients raise."""
    async with aclosing(chunks):
        try:
            async for chunk in chunks:
                yield b"data: " + orjson.dumps(chunk) + b"\n\n"
        except AttuneError as error:
            yield b"data: " + orjson.dumps(error.body()) + b"\n\n"
    yield b"data: [DONE]\n\n"
