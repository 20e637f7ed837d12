"""Endpoints and views of stored completions: get, list, update metadata, delete. Every completion is stored."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import orjson
from fastapi import APIRouter, Path, Query, Request
from pydantic import BaseModel, ConfigDict, Field
from sqlalchemy.ext.asyncio import AsyncSession
from starlette.responses import Response

from app.chat import repository
from app.chat.repository import CompletionRows
from app.chat.schemas import Choice, CompletionView, MetadataKey, MetadataValue, Usage
from app.core.errors import ERROR_RESPONSES, BadRequest, NotFound
from app.core.http import json_body
from app.core.pagination import Page
from app.deployments.resolution import resolve_model
from app.models import Policy, Turn, TurnState, Version
from app.policies.references import parse_reference, version_name
from app.projects.auth import ChatCaller, DatabaseDep

router = APIRouter(prefix="/v1/chat/completions", tags=["chat"], responses=ERROR_RESPONSES)
CompletionId = Annotated[str, Path(min_length=1, max_length=255)]
Limit = Annotated[int, Query(ge=1, le=100)]
After = Annotated[str | None, Query(min_length=1, max_length=255)]
Order = Literal["asc", "desc"]


class StoredChoice(Choice):
    length_penalty: float | None

    @classmethod
    def of(cls, turn: Turn) -> "StoredChoice":
        return cls(
            index=turn.choice_index,
            message={"refusal": None, **(turn.reply or {})},
            logprobs=None,
            finish_reason=turn.finish_reason,
            length_penalty=turn.length_penalty,
        )


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
    status: Literal["open", "done", "aborted", "failed"]

    @classmethod
    def of(cls, turns: Sequence[Turn], policy: Policy, version: Version) -> "StoredCompletion":
        """Return the view of a completion. `turns` are its choices, in order."""
        first = turns[0]
        num_prompt = first.num_prompt_tokens or 0
        num_output = sum(turn.num_output_tokens or 0 for turn in turns)
        return cls(
            id=first.completion_id,
            created=int(first.created_at),
            model=version_name(policy, version),
            choices=[StoredChoice.of(turn) for turn in turns if turn.state == TurnState.DONE],
            usage=Usage(prompt_tokens=num_prompt, completion_tokens=num_output, total_tokens=num_prompt + num_output),
            metadata=first.request_metadata,
            temperature=first.sampling.get("temperature"),
            top_p=first.sampling.get("top_p"),
            seed=first.sampling.get("seed"),
            tools=first.request_params.get("tools"),
            tool_choice=first.request_params.get("tool_choice"),
            response_format=first.request_params.get("response_format"),
            input_user=first.end_user,
            conversation_id=first.conversation_id,
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


class MetadataUpdate(BaseModel):
    model_config = ConfigDict(extra="forbid")

    metadata: dict[MetadataKey, MetadataValue] = Field(max_length=16)


@router.get("", response_model=CompletionList)
async def list_completions(
    request: Request,
    caller: ChatCaller,
    db: DatabaseDep,
    model: Annotated[str | None, Query(min_length=1, max_length=128)] = None,
    after: After = None,
    limit: Limit = 20,
    order: Order = "asc",
) -> Any:
    """List completions. Filter by metadata with `metadata[key]=value`, as OpenAI's clients do; all pairs must match."""
    metadata = parse_metadata_filter(request.query_params)
    async with db.read() as session:
        resolved_model = await _resolve_model(session, caller.project_id, model) if model is not None else None
        last_seen = None
        if after is not None:
            turns, _, _ = await find_completion(session, caller.project_id, after, param="after")
            last_seen = turns[0]
        page = await repository.list_completions(
            session,
            caller.project_id,
            model=resolved_model,
            metadata=metadata,
            after=last_seen,
            newest_first=order == "desc",
            limit=limit,
        )
    return CompletionList.from_rows([StoredCompletion.of(*rows) for rows in page], limit)


@router.get("/{completion_id}", response_model=StoredCompletion)
async def get_completion(completion_id: CompletionId, caller: ChatCaller, db: DatabaseDep) -> Response:
    async with db.read() as session:
        rows = await find_completion(session, caller.project_id, completion_id)
    return _completion_response(rows)


@router.post("/{completion_id}", response_model=StoredCompletion)
async def update_completion(
    completion_id: CompletionId,
    caller: ChatCaller,
    db: DatabaseDep,
    body: Annotated[MetadataUpdate, json_body(MetadataUpdate)],
) -> Any:
    """Replace the metadata of a completion."""

    async def replace(session: AsyncSession) -> CompletionRows:
        rows = await find_completion(session, caller.project_id, completion_id)
        await repository.replace_metadata(session, rows[0], body.metadata)
        return rows

    return _completion_response(await db.retry_on_deadlock(replace))


@router.get("/{completion_id}/messages", response_model=MessageList)
async def list_messages(
    completion_id: CompletionId,
    caller: ChatCaller,
    db: DatabaseDep,
    after: After = None,
    limit: Limit = 20,
    order: Order = "asc",
) -> Any:
    """List the messages of the request."""
    async with db.read() as session:
        turns, _, _ = await find_completion(session, caller.project_id, completion_id)
    messages = [
        StoredMessage(**{"content": None, **message, "id": f"{completion_id}-{index}"})
        for index, message in enumerate(turns[0].messages)
    ]
    if order == "desc":
        messages.reverse()
    if after is not None:
        index = next((index for index, message in enumerate(messages) if message.id == after), None)
        if index is None:
            raise NotFound(f"There is no message '{after}'.", param="after")
        messages = messages[index + 1 :]
    return MessageList.from_rows(messages, limit)


@router.delete("/{completion_id}")
async def delete_completion(completion_id: CompletionId, caller: ChatCaller, db: DatabaseDep) -> DeletedCompletion:
    """Erase the messages, the reply and the tokens of a completion, and drop its samples."""

    async def erase(session: AsyncSession) -> None:
        turns, _, _ = await find_completion(session, caller.project_id, completion_id)
        await repository.erase(session, turns)

    await db.retry_on_deadlock(erase)
    return DeletedCompletion(id=completion_id)


async def find_completion(
    session: AsyncSession, project_id: str, id: str, param: str = "completion_id"
) -> CompletionRows:
    """Return the completion's rows. Raises NotFound that names `param`."""
    rows = await repository.get_completion(session, project_id, id)
    if rows is None:
        raise NotFound(f"There is no completion '{id}'.", param=param)
    return rows


async def _resolve_model(session: AsyncSession, project_id: str, model: str) -> tuple[str, str | None]:
    resolved = await (await session.connection()).run_sync(resolve_model, project_id, model)
    return resolved.policy_id, resolved.version_id if parse_reference(model).names_version else None


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
    return Response(orjson.dumps(view.model_dump()), headers=headers, media_type="application/json")
