"""Anthropic's Messages API: create a message, and count the tokens of its prompt."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

from fastapi import APIRouter, Request
from pydantic import BaseModel
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from app.chat.prompts import PromptService
from app.chat.request_origin import RequestOrigin, disconnect_of
from app.chat.schemas import ChatRequest, parse_chat_request
from app.chat.service import ChatService
from app.chat.typed_events import typed_event_stream
from app.chat.wire_details import WireDetails
from app.core.errors import AttuneError, Unavailable
from app.core.http import EVENT_STREAM, json_body, json_response, services_of
from app.messages.errors import RESPONSES as ERROR_RESPONSES
from app.messages.events import MessageEvents, render_message
from app.messages.schemas import CountRequest, MessagesRequest, parse_count_request, parse_messages_request
from app.messages.translation import has_late_system, to_chat_body
from app.projects.auth import Caller, ChatCaller, GeneratingCaller
from app.projects.episode_keys import takes_episode_keys

router = APIRouter(prefix="/v1/messages", tags=["chat"], responses=ERROR_RESPONSES)
RESPONSES: dict[int | str, dict[str, object]] = {
    200: {
        "description": "a message, or a stream of events",
        "content": {"application/json": {"schema": {"type": "object"}}} | EVENT_STREAM,
    }
}
SESSION_HEADER = "x-claude-code-session-id"
# Parameters of the chat request by those of this API, which errors must name.
RENAMED_PARAMETERS = {"response_format": "output_config.format", "max_completion_tokens": "max_tokens"}


class TokenCount(BaseModel):
    input_tokens: int


@contextmanager
def rename_parameters() -> Iterator[None]:
    """Have errors name the parameters of this API in their messages: they have no field for it."""
    try:
        yield
    except AttuneError as error:
        if error.param is not None:
            name = RENAMED_PARAMETERS.get(error.param, error.param)
            message = error.message.replace(f"'{error.param}'", f"'{name}'")
            error.message = message if name in message else f"{name}: {message}"
        raise


@router.post("", responses=RESPONSES)
@takes_episode_keys
async def create_message(
    request: Request,
    caller: GeneratingCaller,
    body: Annotated[MessagesRequest, json_body(MessagesRequest, parse=parse_messages_request)],
) -> Response:
    """Answer a request of Anthropic's Messages API. Its reply is a recorded chat and can be given feedback."""
    chats = services_of(request).get(ChatService)
    origin, disconnected = RequestOrigin.of(request), disconnect_of(request)
    id = origin.request_id
    details = WireDetails(
        conversation_id=request.headers.get(SESSION_HEADER) or None,
        top_k=body.top_k,
        clamps_max_tokens=True,
        names_stop_text=True,
    )
    with rename_parameters():
        chat_request = await to_chat_request(request, caller, body)
        if not body.stream:
            completed = await chats.complete(caller, chat_request, origin, disconnected, details)
            try:
                message = render_message(completed.content, body.stop_sequences)
            except Unavailable as error:
                if await request.is_disconnected():
                    raise ClientDisconnect from error
                raise
            return json_response(message, headers={**completed.headers, "request-id": id})
        reply = await chats.stream(caller, chat_request, origin, disconnected, details)
    events = MessageEvents(reply.headers["x-completion-id"], reply.headers["x-policy-version"], body.stop_sequences, id)
    return await typed_event_stream(reply, events, {**reply.headers, "request-id": id})


@router.post("/count_tokens", response_model=TokenCount)
@takes_episode_keys
async def count_tokens(
    request: Request,
    caller: ChatCaller,
    body: Annotated[CountRequest, json_body(CountRequest, parse=parse_count_request)],
) -> Response:
    """Count the tokens of a prompt, its tools included. Nothing is generated or recorded."""
    with rename_parameters():
        chat_request = await to_chat_request(request, caller, body)
        count = await services_of(request).get(PromptService).count_tokens(caller, chat_request)
    return json_response({"input_tokens": count}, headers={"request-id": request.state.request_id})


async def to_chat_request(request: Request, caller: Caller, body: CountRequest) -> ChatRequest:
    """Return the equivalent chat request. The engine is asked where the chat template's rules matter."""
    prompts = services_of(request).get(PromptService)
    takes_late_system = not has_late_system(body.messages) or await prompts.takes_late_system(caller, body.model)
    return parse_chat_request(to_chat_body(body, takes_late_system=takes_late_system))
