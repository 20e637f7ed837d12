"""/v1/chat/completions. Every completion is stored: it can be read, listed, changed and deleted."""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from typing import Annotated, Any, Literal

import orjson
from fastapi import APIRouter, Path, Query, Request
from pydantic import AfterValidator, BaseModel, Field
from sqlalchemy.ext.asyncio import AsyncSession
from starlette.responses import Response, StreamingResponse

from app.chat import histories, repository, schemas, service
from app.chat.repository import CompletionRows
from app.chat.schemas import Choice, CompletionView, MetadataKey, MetadataValue, Usage
from app.chat.trace_ids import add_trace_id
from app.core.errors import ERROR_RESPONSES, AttuneError, BadRequest, NotFound
from app.core.http import EVENT_STREAM, StrictModel, json_body, json_response, settings_of
from app.core.pagination import Page
from app.models import AuditAction, Policy, Turn, TurnState, Version, record_audit, to_completion_id
from app.policies.references import version_name
from app.projects.auth import ChatCaller, DatabaseDep, GeneratingCaller
from app.projects.episode_keys import takes_episode_keys

router = APIRouter(prefix="/v1", tags=["chat"], responses=ERROR_RESPONSES)
RESPONSES: dict[int | str, dict[str, object]] = {
    200: {"content": EVENT_STREAM, "description": "a completion, or a stream of chunks"}
}
CompletionId = Annotated[str, Path(min_length=1, max_length=255), AfterValidator(to_completion_id)]
Limit = Annotated[int, Query(ge=1, le=100)]
After = Annotated[str | None, Query(min_length=1, max_length=255)]
Order = Literal["asc", "desc"]


class StoredChoice(Choice):
    length_penalty: float | None


class StoredCompletion(CompletionView):
    """OpenAI's stored completion with the state of its first turn. `choices` holds the choices that are done."""

    choices: list[StoredChoice]  # type: ignore[assignment]
    metadata: dict[str, str]
    temperature: float | None
    top_p: float | None
    seed: int | None
    tools: list[dict[str, Any]] | None
    tool_choice: Any
    response_format: dict[str, Any] | None
    input_user: str | None
    conversation_id: str | None
    episode_id: str | None
    status: Literal["open", "done", "aborted", "failed", "refused"]

    @classmethod
    def of(cls, turns: Sequence[Turn], policy: Policy, version: Version) -> "StoredCompletion":
        """Return the view of a completion. `turns` are its choices, in order."""
        first = turns[0]
        num_prompt, num_output = first.num_prompt_tokens or 0, sum(turn.num_output_tokens or 0 for turn in turns)
        choices = [
            StoredChoice(
                index=turn.choice_index,
                message={"refusal": None, **(turn.reply or {})},
                logprobs=None,
                finish_reason=turn.finish_reason,
                length_penalty=turn.length_penalty,
            )
            for turn in turns
            if turn.state == TurnState.DONE
        ]
        return cls(
            id=first.completion_id,
            created=int(first.created_at),
            model=version_name(policy, version),
            choices=choices,
            usage=Usage(prompt_tokens=num_prompt, completion_tokens=num_output, total_tokens=num_prompt + num_output),
            metadata=first.request_metadata,
            **{name: first.sampling.get(name) for name in ("temperature", "top_p", "seed")},
            **{name: first.request_params.get(name) for name in ("tools", "tool_choice", "response_format")},
            input_user=first.end_user,
            conversation_id=first.conversation_id,
            episode_id=first.episode_id,
            status=first.state,
        )


class CompletionList(Page[StoredCompletion]):
    pass


class StoredMessage(BaseModel):
    id: str
    role: str
    content: str | None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None


class MessageList(Page[StoredMessage]):
    pass


class DeletedCompletion(BaseModel):
    object: Literal["chat.completion.deleted"] = "chat.completion.deleted"
    id: str
    deleted: Literal[True] = True


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
    if not body.stream:
        reply = await service.complete(request, caller, body)
        return json_response(reply.content, headers=reply.headers)
    streamed = await service.stream(request, caller, body)
    return event_stream(server_sent_events(streamed.content), streamed.headers)


def event_stream(events: AsyncIterator[bytes], headers: dict[str, str]) -> Response:
    """Return a response of server-sent events that no proxy may buffer."""
    headers = {**headers, "cache-control": "no-cache", "x-accel-buffering": "no"}
    return StreamingResponse(events, headers=headers, media_type="text/event-stream")


async def server_sent_events(chunks: service.Chunks) -> AsyncIterator[bytes]:
    """Yield server-sent events. A reply that breaks off ends with an error event, which OpenAI's clients raise."""
    async with aclosing(chunks):
        try:
            async for chunk in chunks:
                yield b"data: " + orjson.dumps(chunk) + b"\n\n"
        except AttuneError as error:
            yield b"data: " + orjson.dumps(error.body()) + b"\n\n"
    yield b"data: [DONE]\n\n"


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
