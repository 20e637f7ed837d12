"""Stored completions: found by id or metadata, re-labelled, deleted. Every completion is stored."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import orjson
from fastapi import APIRouter, Path, Query, Request
from pydantic import BaseModel, ConfigDict, Field
from sqlalchemy.ext.asyncio import AsyncSession
from starlette.responses import Response

from app.chat import repository, views
from app.chat.repository import Stored
from app.chat.schemas import Pair, PairKey
from app.core.errors import DOCUMENTED, BadRequest, NotFound
from app.core.http import JsonBody, parse_body, request_body_schema
from app.deployments.resolution import resolve
from app.projects.auth import ChatCaller, DatabaseDep

router = APIRouter(prefix="/v1/chat/completions", tags=["chat"], responses=DOCUMENTED)
CompletionId = Annotated[str, Path(min_length=1, max_length=255)]
Limit = Annotated[int, Query(ge=1, le=100)]
After = Annotated[str | None, Query(min_length=1, max_length=255)]
Order = Literal["asc", "desc"]


class Relabel(BaseModel):
    model_config = ConfigDict(extra="forbid")

    metadata: dict[PairKey, Pair] = Field(max_length=16)


@router.get("", response_model=views.CompletionList)
async def list_completions(
    request: Request,
    caller: ChatCaller,
    db: DatabaseDep,
    model: Annotated[str | None, Query(min_length=1, max_length=128)] = None,
    after: After = None,
    limit: Limit = 20,
    order: Order = "asc",
) -> Any:
    """Filter by metadata with `metadata[key]=value`, as OpenAI's clients write it; all pairs must match."""
    pairs = pairs_of(request.query_params)
    async with db.read() as session:
        wanted = await _model(session, caller.project_id, model) if model is not None else None
        seen = (await found(session, caller.project_id, after, param="after"))[0][0] if after is not None else None
        page = await repository.completions(
            session,
            caller.project_id,
            model=wanted,
            pairs=pairs,
            after=seen,
            newest_first=order == "desc",
            limit=limit + 1,
        )
    return views.CompletionList.cut([views.StoredCompletion.of(*stored) for stored in page], limit)


@router.get("/{completion_id}", response_model=views.StoredCompletion)
async def get_completion(completion_id: CompletionId, caller: ChatCaller, db: DatabaseDep) -> Response:
    async with db.read() as session:
        stored = await found(session, caller.project_id, completion_id)
    return _one(stored)


@router.post("/{completion_id}", response_model=views.StoredCompletion, openapi_extra=request_body_schema(Relabel))
async def update_completion(completion_id: CompletionId, caller: ChatCaller, db: DatabaseDep, body: JsonBody) -> Any:
    """New metadata in place of the old."""
    asked = parse_body(Relabel, body)

    async def relabel(session: AsyncSession) -> Stored:
        stored = await found(session, caller.project_id, completion_id)
        await repository.replace_pairs(session, stored[0], asked.metadata)
        return stored

    return _one(await db.retry_on_deadlock(relabel))


@router.get("/{completion_id}/messages", response_model=views.MessageList)
async def list_messages(
    completion_id: CompletionId,
    caller: ChatCaller,
    db: DatabaseDep,
    after: After = None,
    limit: Limit = 20,
    order: Order = "asc",
) -> Any:
    """What was asked, message by message."""
    async with db.read() as session:
        turns, _, _ = await found(session, caller.project_id, completion_id)
    told = [
        views.StoredMessage(**{"content": None, **message, "id": f"{completion_id}-{at}"})
        for at, message in enumerate(turns[0].messages)
    ]
    if order == "desc":
        told.reverse()
    if after is not None:
        at = next((at for at, message in enumerate(told) if message.id == after), None)
        if at is None:
            raise NotFound(f"There is no message '{after}'.", param="after")
        told = told[at + 1 :]
    return views.MessageList.cut(told, limit)


@router.delete("/{completion_id}")
async def delete_completion(completion_id: CompletionId, caller: ChatCaller, db: DatabaseDep) -> views.Deleted:
    """Messages, reply and tokens are erased; nothing can be learned from them any more."""

    async def erase(session: AsyncSession) -> None:
        turns, _, _ = await found(session, caller.project_id, completion_id)
        await repository.erase(session, turns)

    await db.retry_on_deadlock(erase)
    return views.Deleted(id=completion_id)


async def found(session: AsyncSession, project_id: str, id: str, param: str = "completion_id") -> Stored:
    stored = await repository.completion(session, project_id, id)
    if stored is None:
        raise NotFound(f"There is no completion '{id}'.", param=param)
    return stored


async def _model(session: AsyncSession, project_id: str, model: str) -> tuple[str, str | None]:
    named = await (await session.connection()).run_sync(resolve, project_id, model)
    return named.policy_id, named.version_id if "@" in model else None


def pairs_of(query: Mapping[str, str]) -> dict[str, str]:
    """Example: metadata[user]=7 -> {"user": "7"}"""
    pairs = {
        name[len("metadata[") : -1]: value
        for name, value in query.items()
        if name.startswith("metadata[") and name.endswith("]")
    }
    if len(pairs) > 16:
        raise BadRequest("At most 16 metadata pairs can be asked for.", param="metadata")
    return pairs


def _one(stored: Stored) -> Response:
    view = views.StoredCompletion.of(*stored)
    headers = {"x-completion-id": view.id, "x-policy-version": view.model}
    return Response(orjson.dumps(view.model_dump()), headers=headers, media_type="application/json")
