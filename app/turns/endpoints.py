"""/v1/turns, /v1/conversations and /v1/feedback/search: what was said and what people think of it."""

from typing import Annotated, Literal

from fastapi import APIRouter, Depends, Path, Query

from app.core.errors import ERROR_RESPONSES
from app.models import Origin, RouteReason, SourceKind, TurnState
from app.projects.auth import ContentCaller, DatabaseDep
from app.turns import lists
from app.turns.lists import FeedbackFilter, ScannedFeedback, TurnFilter, TurnPage
from app.turns.story import TurnStory, read_story

router = APIRouter(prefix="/v1", tags=["turns"], responses=ERROR_RESPONSES)
Limit = Annotated[int, Query(ge=1, le=100)]
After = Annotated[str | None, Query(min_length=1, max_length=48, description="the `last_id` of the page before")]
Text = Annotated[str | None, Query(min_length=1, max_length=512)]
PolicyName = Annotated[str | None, Query(min_length=1, max_length=63)]
Number = Annotated[int | None, Query(ge=0, le=999_999_999, description="of a version; with `policy`")]
Time = Annotated[float | None, Query(ge=0, le=1e11, description="Unix seconds")]


def parse_turn_filter(
    policy: PolicyName = None,
    version: Number = None,
    route: RouteReason | None = None,
    origin: Origin = Origin.CHAT,
    state: TurnState | None = None,
    since: Time = None,
    until: Time = None,
    user: Annotated[str | None, Query(min_length=1, max_length=512, description="an end user, exactly")] = None,
    conversation_id: Annotated[str | None, Query(min_length=1, max_length=255)] = None,
    episode_id: Annotated[str | None, Query(min_length=1, max_length=48)] = None,
    trace_id: Annotated[
        str | None, Query(min_length=32, max_length=32, description="of the request's traceparent")
    ] = None,
    judged: Annotated[bool | None, Query(description="whether a person has voted on it")] = None,
    vote: Annotated[Literal["up", "down"] | None, Query(description="somebody has voted so")] = None,
    excluded: Annotated[bool | None, Query(description="whether it must not be trained on")] = None,
) -> TurnFilter:
    return TurnFilter(**locals())


@router.get("/turns")
async def list_turns(
    caller: ContentCaller,
    db: DatabaseDep,
    wanted: Annotated[TurnFilter, Depends(parse_turn_filter)],
    limit: Limit = 20,
    after: After = None,
) -> TurnPage:
    """List turns, the newest first. A page looks at 5,000 turns at most: with filters it may hold few although there
    are more (`has_more`)."""
    async with db.read_snapshot() as session:
        return await lists.list_turns(session, caller.project_id, wanted, after=after, limit=limit)


@router.get("/conversations")
async def list_conversations(
    caller: ContentCaller,
    db: DatabaseDep,
    policy: PolicyName = None,
    version: Number = None,
    route: RouteReason | None = None,
    since: Time = None,
    until: Time = None,
    user: Annotated[str | None, Query(min_length=1, max_length=512, description="an end user, exactly")] = None,
    limit: Limit = 20,
    after: After = None,
) -> TurnPage:
    """List conversations by their newest turns, which are shown, and to which the filters apply."""
    wanted = TurnFilter(policy=policy, version=version, route=route, since=since, until=until, user=user)
    async with db.read_snapshot() as session:
        return await lists.list_conversations(session, caller.project_id, wanted, after=after, limit=limit)


@router.get("/turns/{id}/story")
async def get_story(
    caller: ContentCaller,
    db: DatabaseDep,
    id: Annotated[str, Path(min_length=1, max_length=255, description="of the turn, its request or its response")],
) -> TurnStory:
    """Return a turn with its conversation, feedback, rewards, sample, batches and the versions that learned from it."""
    async with db.read_snapshot() as session:
        return await read_story(session, caller.project_id, id)


@router.get("/feedback/search")
async def search_feedback(
    caller: ContentCaller,
    db: DatabaseDep,
    kind: Text = None,
    name: Text = None,
    source_kind: SourceKind | None = None,
    source_id: Text = None,
    direction: Annotated[Literal["up", "down"] | None, Query(description="of feedback with a number")] = None,
    policy: PolicyName = None,
    version: Number = None,
    since: Time = None,
    until: Time = None,
    limit: Limit = 20,
    after: After = None,
) -> ScannedFeedback:
    """List the project's feedback with its outcomes, the newest first. `policy` and `version` are those of the turn."""
    wanted = FeedbackFilter(
        kind=kind,
        name=name,
        source_kind=source_kind,
        source_id=source_id,
        direction=direction,
        policy=policy,
        version=version,
        since=since,
        until=until,
    )
    async with db.read_snapshot() as session:
        return await lists.list_feedback(session, caller.project_id, wanted, after=after, limit=limit)
