"""Create a response, and read a stored one."""

from typing import Annotated

from fastapi import APIRouter, Path, Request
from starlette.responses import Response

from app.chat.schemas import ChatRequest
from app.core.errors import ERROR_RESPONSES
from app.core.http import json_body, json_response
from app.projects.auth import ChatCaller, DatabaseDep, GeneratingCaller
from app.projects.episode_keys import takes_episode_keys
from app.responses import stored
from app.responses.answers import RESPONSES, answer, parse_both_requests
from app.responses.request import ResponsesRequest

router = APIRouter(prefix="/v1", tags=["chat"], responses=ERROR_RESPONSES)
STORED_RESPONSE: dict[int | str, dict[str, object]] = {
    200: {"description": "a response object", "content": {"application/json": {"schema": {"type": "object"}}}}
}


@router.post("/responses", responses=RESPONSES)
@takes_episode_keys
async def create_response(
    request: Request,
    caller: GeneratingCaller,
    db: DatabaseDep,
    requests: Annotated[tuple[ResponsesRequest, ChatRequest], json_body(ResponsesRequest, parse=parse_both_requests)],
) -> Response:
    """Answer a request of OpenAI's Responses API.

    `input` holds the whole conversation, or continues that of `previous_response_id`, without its instructions.
    """
    return await answer(request, caller, db, requests)


@router.get("/responses/{response_id}", responses=STORED_RESPONSE)
async def get_response(
    response_id: Annotated[str, Path(min_length=1, max_length=255)], caller: ChatCaller, db: DatabaseDep
) -> Response:
    """Return a stored response."""
    async with db.read() as session:
        return json_response(await stored.get_response(session, caller.project_id, response_id))
