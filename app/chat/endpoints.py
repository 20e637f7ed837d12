"""/v1/chat/completions. Every completion is stored: it can be read, listed, changed and deleted."""

from collections.abc import Mapping
from typing import Annotated, Literal

from fastapi import APIRouter, Query, Request
from pydantic import Field
from sqlalchemy.ext.asyncio import AsyncSession
from starlette.responses import Response

from app.chat import histories, repository, schemas
from app.chat.answers import RESPONSES, answer
from app.chat.repository import CompletionRows
from app.chat.schemas import MetadataKey, MetadataValue
from app.chat.trace_ids import add_trace_id
from app.chat.views import CompletionId, CompletionList, DeletedCompletion, MessageList, StoredCompletion, StoredMessage
from app.core.errors import ERROR_RESPONSES, BadRequest, NotFound
from app.core.http import StrictModel, json_body, json_response, settings_of
from app.models import AuditAction, record_audit
from app.projects.auth import ChatCaller, DatabaseDep, GeneratingCaller
from app.projects.episode_keys import takes_episode_keys

router = APIRouter(prefix="/v1", tags=["chat"], responses=ERROR_RESPONSES)
Limit = Annotated[int, Query(ge=1, le=100)]
After = Annotated[str | None, Query(min_length=1, max_length=255)]
Order = Literal["asc", "desc"]


class MetadataUpdate(StrictModel):
    metadata: dict[MetadataKey, MetadataValue] = Field(max_length=16)


@router.post("/chat/completions", response_model=schemas.CompletionView, responses=RESPONSES)
@takes_episode_keys
async def chat(
    request: Request,
    caller: GeneratingCaller,
    body: Annotated[schemas.ChatRequest, json_body(schemas.ChatRequest, parse=schemas.parse_chat_request)],
) -> Response:
    """Answer a chat, as OpenAI's chat completions do. Every completion is stored and can be given feedback."""
    return await answer(request, caller, body)


@router.get("/chat/completions", response_model=CompletionList)
async def list_completions(
    request: Request,
    caller: ChatCaller,
    db: DatabaseDep,
    model: Annotated[str | None, Query(min_length=1, max_length=128)] = None,
    after: After = None,
    limit: Limit = 20,
    order: Order = "asc",
) -> object:
    """List completions. Filter by metadata with `metadata[key]=value`, as OpenAI's clients do; all pairs must match."""
    metadata = parse_metadata_filter(request.query_params)
    newest_first = order == "desc"
    async with db.read() as session:
        page = await repository.list_completions(
            session, caller.project_id, model, metadata, after=after, newest_first=newest_first, limit=limit
        )
    return CompletionList.from_rows([StoredCompletion.of(*rows) for rows in page], limit)


@router.get("/chat/completions/{completion_id}", response_model=StoredCompletion)
async def get_completion(completion_id: CompletionId, caller: ChatCaller, db: DatabaseDep) -> Response:
    async with db.read() as session:
        rows = await repository.get_completion(session, caller.project_id, completion_id)
    return _completion_response(rows)


@router.post("/chat/completions/{completion_id}", response_model=StoredCompletion)
async def update_completion(
    request: Request,
    completion_id: CompletionId,
    caller: ChatCaller,
    db: DatabaseDep,
    body: Annotated[MetadataUpdate, json_body(MetadataUpdate)],
) -> object:
    """Replace the metadata of a completion."""
    pairs = add_trace_id(body.metadata) if settings_of(request).langfuse.intake else body.metadata
    rows = await db.retry_on_deadlock(
        lambda session: repository.replace_metadata(session, caller.project_id, completion_id, body.metadata, pairs)
    )
    return _completion_response(rows)


@router.get("/chat/completions/{completion_id}/messages", response_model=MessageList)
async def list_messages(
    completion_id: CompletionId,
    caller: ChatCaller,
    db: DatabaseDep,
    after: After = None,
    limit: Limit = 20,
    order: Order = "asc",
) -> object:
    """List the messages of the request."""
    async with db.read() as session:
        [first, *_], _, _ = await repository.get_completion(session, caller.project_id, completion_id)
        stored = await histories.read_messages(session, [first.id])
    messages = [
        StoredMessage(**{"content": None, **message, "id": f"{completion_id}-{index}"})
        for index, message in enumerate(stored.get(first.id, []))
    ]
    if order == "desc":
        messages.reverse()
    if after is not None:
        ids = [message.id for message in messages]
        if after not in ids:
            raise NotFound(f"There is no message '{after}'.", param="after")
        messages = messages[ids.index(after) + 1 :]
    return MessageList.from_rows(messages, limit)


@router.delete("/chat/completions/{completion_id}")
async def delete_completion(completion_id: CompletionId, caller: ChatCaller, db: DatabaseDep) -> DeletedCompletion:
    """Erase the messages, the reply and the tokens of a completion, and drop its samples."""

    async def erase(session: AsyncSession) -> None:
        turns, _, _ = await repository.get_completion(session, caller.project_id, completion_id)
        await repository.erase(session, turns)
        action, actor = AuditAction.COMPLETION_DELETED, caller.key_prefix
        record_audit(session, actor, action, completion_id, project_id=caller.project_id)

    await db.retry_on_deadlock(erase)
    return DeletedCompletion(id=completion_id)


def parse_metadata_filter(query: Mapping[str, str]) -> dict[str, str]:
    """Return the metadata to filter by. Example: metadata[user]=7 -> {"user": "7"}."""
    metadata = {
        name[len("metadata[") : -1]: value
        for name, value in query.items()
        if name.startswith("metadata[") and name.endswith("]")
    }
    if len(metadata) > 16:
        raise BadRequest("At most 16 metadata pairs can be filtered by.", param="metadata")
    return metadata


def _completion_response(rows: CompletionRows) -> Response:
    view = StoredCompletion.of(*rows)
    headers = {"x-completion-id": view.id, "x-policy-version": view.model}
    return json_response(view.model_dump(), headers=headers)
