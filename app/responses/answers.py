"""The HTTP response to a request of the Responses API: what its route and that of episodes share."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from fastapi import Request
from starlette.responses import Response

from app.chat.request_origin import RequestOrigin, disconnect_of
from app.chat.schemas import ChatRequest, parse_chat_request
from app.chat.service import ChatService
from app.chat.typed_events import typed_event_stream
from app.chat.wire_details import WireDetails
from app.core.database import Database
from app.core.errors import AttuneError
from app.core.http import EVENT_STREAM, json_response, services_of
from app.inference.request import Sampling
from app.models import ServiceTier
from app.projects.auth import Caller
from app.responses import stored
from app.responses.events import ResponseEvents, render_response
from app.responses.request import ResponsesRequest, parse_responses_request, to_chat_body

RESPONSES: dict[int | str, dict[str, object]] = {
    200: {
        "description": "a response object, or a stream of events",
        "content": {"application/json": {"schema": {"type": "object"}}} | EVENT_STREAM,
    }
}
# Parameters of the chat request by those of this API, which errors must name.
RENAMED_PARAMETERS = {"messages": "input", "response_format": "text", "max_completion_tokens": "max_output_tokens"}


def parse_both_requests(body: dict[str, object]) -> tuple[ResponsesRequest, ChatRequest]:
    """Return the request and the equivalent chat request."""
    request = parse_responses_request(body)
    return request, parse_chat_request(to_chat_body(request))


@contextmanager
def rename_parameters() -> Iterator[None]:
    """Have errors name the parameters of this API."""
    try:
        yield
    except AttuneError as error:
        if (name := RENAMED_PARAMETERS.get(error.param or "")) is not None:
            error.message, error.param = error.message.replace(f"'{error.param}'", f"'{name}'"), name
        raise


async def answer(
    request: Request, caller: Caller, db: Database, requests: tuple[ResponsesRequest, ChatRequest]
) -> Response:
    """Answer a request, given with its chat request: as a whole, or as a stream of events if it asks for one."""
    body, chat_request = requests
    chats = services_of(request).get(ChatService)
    origin, disconnected = RequestOrigin.of(request), disconnect_of(request)
    conversation_id = None
    with rename_parameters():
        if body.previous_response_id is not None:
            async with db.read() as session:
                named = (caller.project_id, body.previous_response_id, caller.episode_id)
                previous = await stored.get_previous_response(session, *named)
            chat_request = parse_chat_request(to_chat_body(body, previous.messages))
            conversation_id = previous.conversation_id
        details = WireDetails(conversation_id, stored.recorded_params(body))
        if not body.stream:
            completed = await chats.complete(caller, chat_request, origin, disconnected, details)
            body = as_served(body, completed.sampling, completed.service_tier)
            return json_response(render_response(body, completed.content), headers=completed.headers)
        reply = await chats.stream(caller, chat_request, origin, disconnected, details)
    completion_id, version = reply.headers["x-completion-id"], reply.headers["x-policy-version"]
    served = as_served(body, reply.sampling, reply.service_tier)
    events = ResponseEvents(served, completion_id, version, int(time.time()))
    return await typed_event_stream(reply, events, reply.headers)


def as_served(request: ResponsesRequest, sampling: Sampling, tier: ServiceTier | None) -> ResponsesRequest:
    """Return the request with what the reply was sampled and served with, which a response names.

    An episode may override both.
    """
    served = {"temperature": sampling.temperature, "top_p": sampling.top_p, "service_tier": tier}
    return request.model_copy(update=served)
