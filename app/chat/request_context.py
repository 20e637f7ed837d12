"""A chat request with what its headers add, and what it continues: its parent turn, and the turns that it repeats."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson
from sqlalchemy import exists, select
from sqlalchemy.engine import Connection
from sqlalchemy.orm import aliased

from app.chat import tasks
from app.chat.conversations import CONVERSATION_ID_KEY, ParentTurn, find_end_user, find_parent
from app.chat.episode_limits import OpenEpisode
from app.chat.schemas import ChatRequest
from app.core.database import Database, now
from app.core.errors import BadRequest
from app.models import Sample, Turn
from app.projects.auth import Caller

RETRY_SECONDS = 1800.0  # OpenAI's clients time out after ten minutes and try three times


@dataclass(frozen=True)
class RequestContext:
    """A chat request with what its headers add.

    `task`: the front end's background task that it is; None for a chat. `episode`: None for a chat outside of one.
    """

    request: ChatRequest
    sha256: str
    conversation_id: str | None
    num_retries: int
    task: str | None
    episode: OpenEpisode | None = None

    @classmethod
    def from_request(
        cls,
        request: ChatRequest,
        headers: Mapping[str, str],
        continued_id: str | None = None,
        episode: OpenEpisode | None = None,
    ) -> "RequestContext":
        """Raises BadRequest for a conversation id that cannot be stored. `continued_id`: if the client names none."""
        conversation_id = request.metadata.get(CONVERSATION_ID_KEY) or headers.get("x-conversation-id") or continued_id
        if conversation_id is not None and (len(conversation_id) > 255 or "\x00" in conversation_id):
            raise BadRequest("A conversation's id holds at most 255 characters.", param="x-conversation-id")
        body = orjson.dumps(request.model_dump(mode="json"), option=orjson.OPT_SORT_KEYS)
        count = headers.get("x-stainless-retry-count", "0")
        num_retries = int(count) if count.isdecimal() and len(count) < 4 else 0
        task = tasks.find_task(request, headers)
        return cls(request, hashlib.sha256(body).hexdigest(), conversation_id, num_retries, task, episode)


async def load_history(
    db: Database, caller: Caller, context: RequestContext, messages: list[dict[str, Any]]
) -> tuple[ParentTurn | None, Sequence[Any]]:
    """Return the parent turn, and the turns that this request may be a retry of. A task has no parent."""
    has_history = context.task is None and (
        context.conversation_id is not None or any(message["role"] == "assistant" for message in messages)
    )
    if not has_history and not context.num_retries:
        return None, ()  # a first turn needs no query

    def read(connection: Connection) -> tuple[ParentTurn | None, Sequence[Any]]:
        parent = None
        if has_history:
            episode_id = context.episode.episode_id if context.episode else None
            named = (context.request.end_user, context.conversation_id, episode_id)
            parent = find_parent(connection, messages, caller, *named)
        return parent, _find_retried_turns(connection, caller, context) if context.num_retries else ()

    return await db.run_read(read)


async def find_named_user(db: Database, caller: Caller, context: RequestContext) -> str | None:
    """Return the end user of the request; if a task names none, that of the conversation that it names.

    A task's prompt quotes its conversation, so the erasure of a person must find it by their name.
    """
    end_user, conversation_id = context.request.end_user, context.conversation_id
    if context.task is None or end_user is not None or conversation_id is None:
        return end_user
    return await db.run_read(lambda connection: find_end_user(connection, caller, conversation_id))


def _find_retried_turns(connection: Connection, caller: Caller, context: RequestContext) -> Sequence[Any]:
    """Return the newest turns with the same body and API key: those that an automatic retry repeats.

    At most as many completions as the client says it has tried, and no turn that has a child: its reply had arrived.
    """
    is_named = context.conversation_id is not None and context.task is None
    scope = [Turn.conversation_id == context.conversation_id] if is_named else []
    if context.episode is not None:
        scope.append(Turn.episode_id == context.episode.episode_id)
    child = aliased(Turn)
    return connection.execute(
        select(Turn.id, exists().where(Sample.turn_id == Turn.id).label("has_sample"))
        .where(
            Turn.key_id == caller.key_id,
            Turn.request_sha256 == context.sha256,
            Turn.created_at > now() - RETRY_SECONDS,
            Turn.deleted_at.is_(None),
            ~exists().where(child.parent_id == Turn.id),
            *scope,
        )
        .order_by(Turn.created_at.desc(), Turn.id.desc())
        .limit(context.num_retries * context.request.n)
    ).all()
