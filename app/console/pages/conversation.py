"""A conversation, a single reply, and the search for either by any id."""

import re
from typing import Annotated
from urllib.parse import quote

from fastapi import APIRouter, Path, Query
from starlette.responses import RedirectResponse, Response

from app.console import conversations
from app.console.access import ContentReader, Visit
from app.console.conversations import Conversation
from app.console.rendering import render_page
from app.core.errors import NotFound
from app.models import Origin, Turn

router = APIRouter()
Id = Annotated[str, Path(min_length=1, max_length=255)]
VERSION = re.compile(r"(?:(?P<policy>[\w-]+)@)?v(?P<number>\d{1,9})")


def turn_path(turn: Turn) -> str:
    """Return the address of a reply: its place in its conversation, or a page of its own."""
    if turn.conversation_id is None or turn.origin != Origin.CHAT:
        return f"/console/replies/{quote(turn.id, safe='')}"
    return f"/console/conversations/{quote(turn.conversation_id, safe='')}#{quote(turn.id)}"


@router.get("/conversations/{id:path}")
async def show_conversation(visit: ContentReader, id: Id) -> Response:
    async with visit.db.read() as session:
        conversation = await conversations.read_conversation(session, visit.caller.project_id, id)
    return await _show(visit, conversation)


@router.get("/replies/{id}")
async def show_reply(visit: ContentReader, id: Id) -> Response:
    async with visit.db.read() as session:
        conversation = await conversations.read_turn(session, visit.caller.project_id, id)
    return await _show(visit, conversation)


async def _show(visit: Visit, conversation: Conversation) -> Response:
    policy, names = await visit.choose_policy(conversation.policy)
    return await render_page(
        visit, "conversation.html", "Live", policy=policy, policies=names, conversation=conversation
    )


@router.get("/find")
async def find(visit: ContentReader, id: Annotated[str, Query(max_length=255)] = "") -> Response:
    """Go to what an id names: a reply, feedback, a request, a conversation or a version."""
    id = id.strip()
    if (version := VERSION.fullmatch(id)) is not None:
        policy = f"?policy={quote(version['policy'])}" if version["policy"] else ""
        return RedirectResponse(f"/console/versions/{version['number']}{policy}", 303)
    async with visit.db.read() as session:
        turn = await conversations.find_turn(session, visit.caller.project_id, id)
        if turn is not None:
            return RedirectResponse(turn_path(turn), 303)
        if id and await conversations.conversation_exists(session, visit.caller.project_id, id):
            return RedirectResponse(f"/console/conversations/{quote(id, safe='')}", 303)
    raise NotFound(
        f"Nothing here has the id '{id}'. Try a completion (chatcmpl-…), a request (req-…), feedback (fb-…), "
        "a conversation or a version (v12)."
    )
