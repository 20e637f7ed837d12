"""/v1/episodes: create an episode, chat in it, end it with an outcome, and read episodes."""

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Header, Path, Query, Request, Response

from app.chat import answers as chats
from app.chat.model_views import ModelList, render_models, view_models
from app.chat.schemas import ChatRequest, CompletionView, parse_chat_request
from app.core.errors import ERROR_RESPONSES, BadRequest, NotFound
from app.core.http import json_body, services_of
from app.core.settings import Settings
from app.episodes import content, episode_ends, service
from app.episodes.graph import read_graph
from app.episodes.schemas import (
    DeletedEpisode,
    EndRequest,
    EpisodeGraphView,
    EpisodeList,
    EpisodeRequest,
    EpisodeView,
    NewEpisodeView,
)
from app.episodes.service import EpisodeFilter
from app.episodes.views import show_with_key
from app.feedback.feedback_writer import FeedbackWriter
from app.models import EndReason
from app.projects.auth import Caller, ChatCaller, DatabaseDep, GeneratingCaller, sent_credential
from app.projects.episode_keys import takes_episode_keys
from app.projects.idempotency import SHOWS_SECRET
from app.responses import answers as responses
from app.responses.request import ResponsesRequest

router = APIRouter(prefix="/v1/episodes", tags=["episodes"], responses=ERROR_RESPONSES)
EpisodeId = Annotated[str, Path(min_length=1, max_length=48)]
Id = Annotated[str | None, Query(min_length=1, max_length=48)]
REPLAY: dict[int | str, dict[str, Any]] = {
    200: {"model": NewEpisodeView, "description": "a replay: this episode was created before"}
}


@router.post("", status_code=201, dependencies=[SHOWS_SECRET], responses=REPLAY)
async def create_episode(
    request: Request,
    response: Response,
    caller: ChatCaller,
    db: DatabaseDep,
    body: Annotated[EpisodeRequest, json_body(EpisodeRequest)],
    idempotency_key: Annotated[str | None, Header(min_length=1, max_length=255)] = None,
) -> NewEpisodeView:
    """Create an episode. Its `base_url` and `api_key` are all that the agent's program needs.

    The same Idempotency-Key from the same API key returns the same episode, with its key.
    """
    if idempotency_key is not None and "\x00" in idempotency_key:
        raise BadRequest("An Idempotency-Key cannot hold a NUL character.", param="Idempotency-Key")
    async with db.write() as session:
        view, key, is_replay = await service.create(
            session, services_of(request).get(Settings), caller, sent_credential(request), body, idempotency_key
        )
    return show_with_key(request, response, view, key, is_replay=is_replay)


@router.get("")
async def list_episodes(
    caller: ChatCaller,
    db: DatabaseDep,
    policy: Annotated[str | None, Query(min_length=1, max_length=63)] = None,
    task: Annotated[str | None, Query(min_length=1, max_length=255)] = None,
    group: Annotated[str | None, Query(min_length=1, max_length=255, description="the id of a group")] = None,
    state: Literal["open", "ended"] | None = None,
    after: Id = None,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    order: Literal["asc", "desc"] = "asc",
) -> EpisodeList:
    """List episodes by creation time."""
    wanted, newest_first = EpisodeFilter(policy, task, group, state), order == "desc"
    async with db.read() as session:
        views = await service.list_page(
            session, caller.project_id, wanted, after=after, limit=limit, newest_first=newest_first
        )
    return EpisodeList.from_rows(views, limit)


@router.get("/{episode_id}")
@takes_episode_keys
async def get_episode(episode_id: EpisodeId, caller: ChatCaller, db: DatabaseDep) -> EpisodeGraphView:
    """Return one episode with the graph of its turns."""
    _require_own(caller, episode_id)
    async with db.read_snapshot() as session:
        view = await service.get(session, caller.project_id, episode_id)
        turns, has_more = await read_graph(session, caller.project_id, episode_id)
    return EpisodeGraphView(**view.model_dump(), turns=turns, has_more_turns=has_more)


@router.post("/{episode_id}/end")
@takes_episode_keys
async def end_episode(
    request: Request,
    episode_id: EpisodeId,
    caller: ChatCaller,
    db: DatabaseDep,
    body: Annotated[EndRequest, json_body(EndRequest)],
) -> EpisodeView:
    """End an episode. Its outcome becomes the reward of its chats, as feedback on it does.

    An episode that a limit has ended takes the outcome too. One that failed without an outcome has that of
    `rewards.episode_failure`, if the key may report outcomes. The same report again changes nothing; another one is
    refused, because later feedback on the episode can correct it.
    """
    _require_own(caller, episode_id)
    default_outcome: float | None = None
    if body.outcome is not None:
        episode_ends.require_outcome_scope(caller)
    elif body.reason == EndReason.FAILED.value and episode_ends.may_report_outcome(caller):
        async with db.read() as session:
            settings = services_of(request).get(Settings)
            default_outcome = await episode_ends.read_failure_outcome(session, settings, episode_id)
    limits = services_of(request).get(FeedbackWriter).limits
    await episode_ends.end(db, caller.project_id, episode_id, body, limits, default_outcome)
    async with db.read() as session:
        return await service.get(session, caller.project_id, episode_id)


@router.delete("/{episode_id}")
async def delete_episode(episode_id: EpisodeId, caller: ChatCaller, db: DatabaseDep) -> DeletedEpisode:
    """Erase the content of an episode and of all its chats, and drop their samples. An open one ends as abandoned."""
    await content.delete(db, caller.project_id, episode_id, caller.key_prefix)
    return DeletedEpisode(id=episode_id)


@router.post("/{episode_id}/chat/completions", response_model=CompletionView, responses=chats.RESPONSES)
@takes_episode_keys
async def chat_in_episode(
    request: Request,
    episode_id: EpisodeId,
    caller: GeneratingCaller,
    body: Annotated[ChatRequest, json_body(ChatRequest, parse=parse_chat_request)],
) -> Response:
    """Answer a chat of this episode, as `POST /v1/chat/completions` does."""
    return await chats.answer(request, caller, body)


@router.post("/{episode_id}/responses", responses=responses.RESPONSES)
@takes_episode_keys
async def create_response_in_episode(
    request: Request,
    episode_id: EpisodeId,
    caller: GeneratingCaller,
    db: DatabaseDep,
    requests: Annotated[
        tuple[ResponsesRequest, ChatRequest], json_body(ResponsesRequest, parse=responses.parse_both_requests)
    ],
) -> Response:
    """Answer a request of OpenAI's Responses API in this episode, as `POST /v1/responses` does."""
    return await responses.answer(request, caller, db, requests)


@router.get("/{episode_id}/models", response_model=ModelList)
@takes_episode_keys
async def list_models_in_episode(
    request: Request, episode_id: EpisodeId, caller: ChatCaller, db: DatabaseDep
) -> ModelList | Response:
    """List the models, as `GET /v1/models` does: clients ask for them at their base URL."""
    _require_own(caller, episode_id)
    async with db.read() as session:
        await service.get(session, caller.project_id, episode_id)
        views = await view_models(session, caller.project_id)
    return render_models(views, request.headers)


def _require_own(caller: Caller, episode_id: str) -> None:
    """Raise NotFound if the caller has the key of another episode."""
    if caller.episode_id not in (None, episode_id):
        raise NotFound(f"There is no episode '{episode_id}'.", param="episode_id")
