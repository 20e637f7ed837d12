"""Lists of turns, conversations and feedback, the newest first, with filters."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import BaseModel, Field
from sqlalchemy import ColumnElement, exists, func, select
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import aliased, defer

from app.core.errors import BadRequest, require_row
from app.core.pagination import Page
from app.core.planner import prefer_indexes
from app.feedback.feedback_rows import to_feedback_row
from app.feedback.queries import read_views, select_all_feedback
from app.feedback.schemas import FeedbackView
from app.models import Feedback, Origin, Policy, Reward, RouteReason, Sample, Turn, TurnState, Version
from app.policies import repository, service
from app.policies.references import format_reference
from app.raters.approval import is_vote
from app.turns.bounded_scan import read_page
from app.turns.story import Exclusion, view_exclusion

PREVIEW_CHARACTERS = 300
KEY = (Turn.created_at, Turn.id)


class TurnFilter(BaseModel):
    """Which turns are listed. Fields that are None filter nothing."""

    policy: str | None = None
    version: int | None = None
    route: RouteReason | None = None
    origin: Origin = Origin.CHAT
    state: TurnState | None = None
    since: float | None = None
    until: float | None = None
    user: str | None = None
    conversation_id: str | None = None
    episode_id: str | None = None
    trace_id: str | None = None
    judged: bool | None = None
    vote: Literal["up", "down"] | None = None
    excluded: bool | None = None


class TurnItem(BaseModel):
    object: Literal["turn"] = "turn"
    id: str
    completion_id: str
    choice_index: int
    conversation_id: str | None
    episode_id: str | None
    agent: str | None = Field(description="its role in the episode")
    policy: str
    version: str
    route_reason: str
    origin: str
    engine: str
    state: str
    created_at: float
    finished_at: float | None
    end_user: str | None
    num_prompt_tokens: int | None
    num_output_tokens: int | None
    exclusion: Exclusion | None
    prompt: str | None = Field(description="the last message of the prompt, up to 300 characters")
    reply: str | None = Field(description="up to 300 characters; null for a reply without text")
    up: int = Field(description="people's votes for the reply")
    down: int
    sample_state: str | None


class TurnPage(Page[TurnItem]):
    """`last_id` is the `after` of the next page. A page with filters may hold few turns although there are more."""


class ScannedFeedback(Page[FeedbackView]):
    """`last_id` is the `after` of the next page. A page with filters may hold little although there is more."""


async def list_turns(
    session: AsyncSession, project_id: str, wanted: TurnFilter, *, after: str | None, limit: int
) -> TurnPage:
    """Return a page of turns. Raises NotFound, BadRequest."""
    filters: list[ColumnElement[bool]] = []
    if wanted.judged is not None or wanted.vote is not None:
        vote = exists().where(Reward.turn_id == Turn.id, is_vote())
        if wanted.vote is not None:
            vote = vote.where(Reward.value > 0 if wanted.vote == "up" else Reward.value < 0)
        filters.append(~vote if wanted.judged is False else vote)
    return await _list(session, project_id, wanted, filters, after, limit)


async def list_conversations(
    session: AsyncSession, project_id: str, wanted: TurnFilter, *, after: str | None, limit: int
) -> TurnPage:
    """Return the newest turn of each conversation. Raises NotFound, BadRequest."""
    later = aliased(Turn)
    is_newest = ~exists().where(
        later.project_id == Turn.project_id,
        later.conversation_id == Turn.conversation_id,
        later.origin == Origin.CHAT,
        (later.created_at > Turn.created_at) | ((later.created_at == Turn.created_at) & (later.id > Turn.id)),
    )
    filters = [Turn.conversation_id.is_not(None), is_newest]
    return await _list(session, project_id, wanted, filters, after, limit)


async def _list(
    session: AsyncSession,
    project_id: str,
    wanted: TurnFilter,
    filters: list[ColumnElement[bool]],
    after: str | None,
    limit: int,
) -> TurnPage:
    await prefer_indexes(session)
    indexed: list[ColumnElement[bool]] = [Turn.project_id == project_id]
    policy_id, version_id = await _find_version(session, project_id, wanted.policy, wanted.version)
    # The first of these is in an index together with the time, and the others are looked at row by row.
    selective: list[ColumnElement[bool]] = []
    if wanted.conversation_id is not None:
        selective.append(Turn.conversation_id == wanted.conversation_id)
    if wanted.episode_id is not None:
        selective.append(Turn.episode_id == wanted.episode_id)
    if wanted.trace_id is not None:
        selective.append(Turn.trace_id == wanted.trace_id)
    if wanted.user is not None:
        selective.append(Turn.end_user == wanted.user)
    if version_id is not None:
        selective.append(Turn.version_id == version_id)
    indexed, filters = indexed + selective[:1], filters + selective[1:]
    if wanted.since is not None:
        indexed.append(Turn.created_at >= wanted.since)
    if wanted.until is not None:
        indexed.append(Turn.created_at < wanted.until)
    if policy_id is not None and version_id is None:
        filters.append(Turn.policy_id == policy_id)
    filters.append(Turn.origin == wanted.origin)
    if wanted.route is not None:
        filters.append(Turn.route_reason == wanted.route)
    if wanted.state is not None:
        filters.append(Turn.state == wanted.state)
    if wanted.excluded is not None:
        filters.append(Turn.exclusion_reason.is_not(None) if wanted.excluded else Turn.exclusion_reason.is_(None))
    query: Any = (
        select(Turn, Policy.name, Version.number, Sample.state, *KEY)
        .join(Policy, Policy.id == Turn.policy_id)
        .join(Version, Version.id == Turn.version_id)
        .outerjoin(Sample, Sample.turn_id == Turn.id)
        .options(defer(Turn.own_prompt_ids), defer(Turn.output_ids), defer(Turn.logprobs))
    )
    last = None if after is None else await _read_key(session, project_id, after)
    page = await read_page(session, query, KEY, indexed=indexed, filters=filters, after=last, limit=limit)
    votes = await _count_votes(session, [row[0].id for row in page.rows])
    data = [_view(row[0], row[1], row[2], row[3], votes.get(row[0].id, (0, 0))) for row in page.rows]
    last_id = page.last[-1] if page.last is not None else (data[-1].id if data else None)
    return TurnPage(data=data, first_id=data[0].id if data else None, last_id=last_id, has_more=page.last is not None)


async def _find_version(
    session: AsyncSession, project_id: str, policy_name: str | None, number: int | None
) -> tuple[str | None, str | None]:
    """Return the ids of the policy and of the version that are asked for. Raises NotFound, BadRequest."""
    if policy_name is None:
        if number is not None:
            raise BadRequest("'version' is a number: name its 'policy' too.", param="version", code="invalid_value")
        return None, None
    policy = await service.get_policy(session, project_id, policy_name)
    if number is None:
        return policy.id, None
    version = await repository.find_version(session, policy.id, number)
    message = f"Policy '{policy.name}' has no version 'v{number}'."
    return policy.id, require_row(version, message, code="model_not_found", param="version").id


async def _read_key(session: AsyncSession, project_id: str, id: str) -> tuple[Any, ...]:
    row = (await session.execute(select(*KEY).where(Turn.project_id == project_id, Turn.id == id))).one_or_none()
    return tuple(require_row(row, f"There is no turn '{id}'.", param="after"))


async def _count_votes(session: AsyncSession, turn_ids: Sequence[str]) -> dict[str, tuple[int, int]]:
    """Return the numbers of votes for and against, by turn."""
    query = (
        select(Reward.turn_id, func.count().filter(Reward.value > 0), func.count().filter(Reward.value < 0))
        .where(Reward.turn_id.in_(turn_ids), is_vote())
        .group_by(Reward.turn_id)
    )
    return {id: (up, down) for id, up, down in await session.execute(query)}


def _view(turn: Turn, policy: str, number: int, sample_state: str | None, votes: tuple[int, int]) -> TurnItem:
    named = (
        "id",
        "completion_id",
        "choice_index",
        "conversation_id",
        "episode_id",
        "agent",
        "route_reason",
        "origin",
        "engine",
        "state",
    )
    timed = ("created_at", "finished_at", "end_user", "num_prompt_tokens", "num_output_tokens")
    return TurnItem(
        **{name: getattr(turn, name) for name in (*named, *timed)},
        policy=policy,
        version=format_reference(policy, number),
        exclusion=view_exclusion(turn.exclusion_reason),
        prompt=_preview(turn.own_messages[-1]) if turn.own_messages else None,
        reply=_preview(turn.reply) if turn.reply else None,
        up=votes[0],
        down=votes[1],
        sample_state=sample_state,
    )


def _preview(message: Mapping[str, object]) -> str | None:
    """Return the beginning of a message's text; its content is a text or a list of parts."""
    content = message.get("content")
    if isinstance(content, list):
        content = " ".join(part.get("text", "") for part in content if isinstance(part, dict))
    return content[:PREVIEW_CHARACTERS] if isinstance(content, str) else None


class FeedbackFilter(BaseModel):
    """Which feedback is listed. Fields that are None filter nothing."""

    kind: str | None = None
    name: str | None = None
    source_kind: str | None = None
    source_id: str | None = None
    direction: Literal["up", "down"] | None = None
    policy: str | None = None
    version: int | None = None
    since: float | None = None
    until: float | None = None


async def list_feedback(
    session: AsyncSession, project_id: str, wanted: FeedbackFilter, *, after: str | None, limit: int
) -> ScannedFeedback:
    """Return a page of a project's feedback with its outcomes, the newest first. Raises NotFound, BadRequest."""
    await prefer_indexes(session)
    indexed: list[ColumnElement[bool]] = [Feedback.project_id == project_id]
    if wanted.source_id is not None:
        indexed.append(Feedback.source_id == wanted.source_id)
    policy_id, version_id = await _find_version(session, project_id, wanted.policy, wanted.version)
    exact = {Feedback.kind: wanted.kind, Feedback.name: wanted.name, Feedback.source_kind: wanted.source_kind}
    filters = [column == value for column, value in exact.items() if value is not None]
    if wanted.direction is not None:
        filters.append(Feedback.value > 0 if wanted.direction == "up" else Feedback.value < 0)
    if wanted.since is not None:
        filters.append(Feedback.created_at >= wanted.since)
    if wanted.until is not None:
        filters.append(Feedback.created_at < wanted.until)
    if version_id is not None:
        filters.append(Turn.version_id == version_id)
    elif policy_id is not None:
        filters.append(Turn.policy_id == policy_id)
    last = None
    if after is not None:
        seq = await session.scalar(select(Feedback.seq).where(Feedback.project_id == project_id, Feedback.id == after))
        last = (require_row(seq, f"There is no feedback '{after}'.", param="after"),)
    query = select_all_feedback().add_columns(Feedback.seq.label("key"))
    page = await read_page(session, query, (Feedback.seq,), indexed=indexed, filters=filters, after=last, limit=limit)
    rows = [to_feedback_row(row._mapping) for row in page.rows]
    views = [FeedbackView.model_validate(view) for view in await read_views(session, project_id, rows)]
    last_id = views[-1].id if views else None
    if page.last is not None:
        last_id = await session.scalar(select(Feedback.id).where(Feedback.seq == page.last[0]))
    return ScannedFeedback(
        data=views, first_id=views[0].id if views else None, last_id=last_id, has_more=page.last is not None
    )
