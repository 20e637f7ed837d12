"""/v1/turns/{id}/story: one turn, with its conversation, and all that became of it up to the versions it taught."""

from collections.abc import Sequence
from typing import Literal

from pydantic import BaseModel, Field
from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from alignment.json_values import JsonObject
from app.chat.histories import read_messages
from app.core.errors import require_row
from app.core.http import RowView
from app.core.planner import prefer_indexes
from app.feedback.feedback_rows import FeedbackRow, to_feedback_row
from app.feedback.queries import read_views, select_feedback_on_turn
from app.feedback.schemas import FeedbackView
from app.models import (
    Batch,
    BatchTurn,
    Feedback,
    Judgement,
    Origin,
    Policy,
    Rater,
    Reward,
    Sample,
    SourceKind,
    Turn,
    Version,
    to_completion_id,
)
from app.policies.references import format_reference, version_name
from app.raters import names
from app.turns.exclusion import ExclusionCode, exclusion_code

MAX_CONVERSATION_TURNS = 100  # the newest ones
MAX_FEEDBACK = 200  # the newest ones


class Exclusion(BaseModel):
    """Why the turn must not be trained on."""

    code: ExclusionCode
    reason: str


class Tokens(BaseModel):
    """What was captured from the engine. Training needs all of the ids and one log-prob for each output token."""

    num_prompt: int | None
    num_output: int | None
    num_output_ids: int
    num_logprobs: int
    has_prompt_ids: bool


class ConversationTurn(RowView):
    id: str
    parent_id: str | None
    version: str
    state: str
    created_at: float


class StoryFeedback(FeedbackView):
    rater: str | None = Field(description="who is responsible for it; null where the source was removed")
    standing: str | None = Field(description="the rater's: normal, trusted, quarantined or blocked; null without a row")


class StoryReward(RowView):
    source: str
    reward_source: str = Field(description="the reward source in the policy's configuration that it belongs to")
    rater: str | None
    value: float
    weight: float
    feedback_id: str | None


class StoryJudgement(RowView):
    source: str
    state: str
    value: float | None
    reason: str | None
    due_at: float
    settled_at: float | None


class StorySample(RowView):
    state: str
    reward: float
    rule: str | None = Field(description="if it was dropped: by which rule; `reason` says it as a sentence")
    reason: str | None
    rater: str | None
    uses_feedback: bool
    ready_at: float
    num_returns: int
    batch_id: str | None


class StoryBatch(RowView):
    """A batch that the turn was in, and the version that the update created."""

    id: str
    state: str
    reason: str | None
    created_at: float
    settled_at: float | None
    version: str | None
    version_state: str | None
    version_reason: str | None = Field(description="why that version was rejected or rolled back")
    live_at: float | None


class TurnStory(RowView):
    object: Literal["turn.story"] = "turn.story"
    id: str
    completion_id: str
    choice_index: int
    policy: str
    version: str
    version_state: str
    route_reason: str
    origin: str
    engine: str
    state: str
    finish_reason: str | None
    stream: bool
    created_at: float
    first_token_at: float | None
    finished_at: float | None
    deleted_at: float | None
    end_user: str | None
    key_id: str | None
    metadata: JsonObject
    sampling: JsonObject
    conversation_id: str | None
    episode_id: str | None
    episode_step: int | None
    agent: str | None
    state_key: str | None
    trace_id: str | None
    span_id: str | None
    parent_id: str | None
    shadow_of_id: str | None
    prefix_reuse: str | None
    messages: list[JsonObject] = Field(description="of the prompt; empty once the turn is deleted")
    reply: JsonObject | None
    tokens: Tokens
    exclusion: Exclusion | None = Field(description="null where the turn may be trained on")
    conversation: list[ConversationTurn] = Field(description="its newest 100 chat turns, the oldest first")
    feedback: list[StoryFeedback] = Field(
        description="on the turn, its place in rankings, its whole conversation and its episode: the newest 200, in "
        "order of arrival"
    )
    rewards: list[StoryReward]
    judgements: list[StoryJudgement]
    sample: StorySample | None
    batches: list[StoryBatch]


async def read_story(session: AsyncSession, project_id: str, id: str) -> TurnStory:
    """Return the story of a turn. The session is one of `Database.read_snapshot`. Raises NotFound."""
    await prefer_indexes(session)
    query = (
        select(Turn, Policy, Version)
        .join(Policy, Policy.id == Turn.policy_id)
        .join(Version, Version.id == Turn.version_id)
        .where(Turn.project_id == project_id, Turn.id == to_completion_id(id))
    )
    found = (await session.execute(query)).one_or_none()
    turn, policy, version = require_row(found, f"There is no turn '{id}'.", param="id")
    sample = await session.get(Sample, turn.id)
    judgements = select(Judgement).where(Judgement.turn_id == turn.id).order_by(Judgement.created_at, Judgement.id)
    messages = await read_messages(session, [turn.id]) if turn.deleted_at is None else {}
    return TurnStory.from_row(
        turn,
        policy=policy.name,
        version=version_name(policy, version),
        version_state=version.state,
        metadata=turn.request_metadata,
        messages=messages.get(turn.id, []),
        tokens=Tokens(
            num_prompt=turn.num_prompt_tokens,
            num_output=turn.num_output_tokens,
            num_output_ids=len(turn.output_ids or ()),
            num_logprobs=len(turn.logprobs or ()),
            has_prompt_ids=turn.own_prompt_ids is not None,
        ),
        exclusion=view_exclusion(turn.exclusion_reason),
        conversation=await _read_conversation(session, turn),
        feedback=await _read_feedback(session, turn),
        rewards=await _read_rewards(session, turn),
        judgements=[StoryJudgement.from_row(row) for row in await session.scalars(judgements)],
        sample=StorySample.from_row(sample) if sample is not None else None,
        batches=await _read_batches(session, turn),
    )


def view_exclusion(reason: str | None) -> Exclusion | None:
    """Return the exclusion of a turn with its code."""
    return None if reason is None else Exclusion(code=exclusion_code(reason), reason=reason)


async def _read_conversation(session: AsyncSession, turn: Turn) -> list[ConversationTurn]:
    if turn.conversation_id is None:
        return []
    query = (
        select(Turn.id, Turn.parent_id, Turn.state, Turn.created_at, Policy.name, Version.number)
        .join(Policy, Policy.id == Turn.policy_id)
        .join(Version, Version.id == Turn.version_id)
        .where(
            Turn.project_id == turn.project_id,
            Turn.conversation_id == turn.conversation_id,
            Turn.origin == Origin.CHAT,
        )
        .order_by(Turn.created_at.desc(), Turn.id.desc())
        .limit(MAX_CONVERSATION_TURNS)
    )
    rows = (await session.execute(query)).all()[::-1]
    return [ConversationTurn.from_row(row, version=format_reference(row.name, row.number)) for row in rows]


async def _read_feedback(session: AsyncSession, turn: Turn) -> list[StoryFeedback]:
    query = select_feedback_on_turn(turn).order_by(Feedback.seq.desc()).limit(MAX_FEEDBACK)
    rows = [to_feedback_row(row) for row in (await session.execute(query)).mappings()][::-1]
    views = await read_views(session, turn.project_id, rows)
    raters = [_rater_of(row, turn) for row in rows]
    standings = await _read_standings(session, turn.project_id, raters)
    return [
        StoryFeedback.model_validate({**view, "rater": rater, "standing": standings.get(rater or "")})
        for view, rater in zip(views, raters, strict=True)
    ]


def _rater_of(row: FeedbackRow, turn: Turn) -> str | None:
    """Return the rater whom the feedback names; a person without a name is the end user of the conversation."""
    if row["emptied_at"] is not None:
        return None
    if row["source_id"] or row["source_kind"] != SourceKind.HUMAN:
        return names.feedback_rater(row["source_kind"], row["source_id"])
    return names.turn_rater(turn.end_user, turn.conversation_id, turn.id)


async def _read_standings(session: AsyncSession, project_id: str, raters: Sequence[str | None]) -> dict[str, str]:
    query = select(Rater.name, Rater.standing).where(Rater.project_id == project_id, Rater.name.in_(set(raters)))
    return {name: standing for name, standing in await session.execute(query)}


async def _read_rewards(session: AsyncSession, turn: Turn) -> list[StoryReward]:
    query = (
        select(Reward, Feedback.id)
        .outerjoin(Feedback, Feedback.seq == Reward.feedback_seq)
        .where(Reward.turn_id == turn.id)
        .order_by(Reward.reward_source, Reward.source)
    )
    return [StoryReward.from_row(row, feedback_id=id) for row, id in await session.execute(query)]


async def _read_batches(session: AsyncSession, turn: Turn) -> list[StoryBatch]:
    query = (
        select(Batch, Version, Policy.name)
        .join(BatchTurn, BatchTurn.batch_id == Batch.id)
        .join(Policy, Policy.id == Batch.policy_id)
        .outerjoin(Version, Version.id == Batch.version_id)
        .where(BatchTurn.turn_id == turn.id)
        .order_by(Batch.created_at, Batch.id)
    )
    return [
        StoryBatch.from_row(
            batch,
            version=format_reference(policy, version.number) if version else None,
            version_state=version.state if version else None,
            version_reason=version.reason if version else None,
            live_at=version.live_at if version else None,
        )
        for batch, version, policy in await session.execute(query)
    ]
