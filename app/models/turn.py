"""Turn: one reply of the model with the exact tokens of the engine, and the metadata that it is found by."""

from collections.abc import Collection
from enum import StrEnum
from typing import TypedDict

from sqlalchemy import JSON, ForeignKey, Index, String, false, select, text
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Mapped, mapped_column

from alignment.chat_messages import AssistantMessage
from app.models.base import Base, Entity, Json, Logprobs, TokenIds, partial_index

LOST_REASON = "the server died mid-reply"
ENGINE_REFUSED = "the engine refused the request"  # how an exclusion reason begins
SERVER_LOST = "server_lost"  # the finish reason of a turn whose process died


class TurnState(StrEnum):
    OPEN = "open"  # being generated: the row exists before the first byte leaves
    DONE = "done"
    ABORTED = "aborted"  # the client disconnected, or the process died
    FAILED = "failed"  # the engine failed
    REFUSED = "refused"  # the engine refused the request, whose fault that is: there is no reply


class Origin(StrEnum):
    """Why a turn was generated: for a request of a client, or as a rollout of the service itself."""

    CHAT = "chat"
    TASK = "task"  # a background task of a front end, such as a title: no part of a conversation, never learned from
    GROUP_SAMPLE = "group_sample"  # another reply to a chat's prompt, sampled off the hot path
    PROMPT_SET = "prompt_set"  # a reply to a prompt of a dataset
    SHADOW = "shadow"  # a candidate's reply to a chat's prompt, never learned from


REQUESTED = (Origin.CHAT, Origin.TASK)  # what clients request; everything else is a rollout


class RouteReason(StrEnum):
    """Why this version answered."""

    STABLE = "stable"  # the deployed version
    CANARY = "canary"  # the request was in the canary's share
    PINNED = "pinned"
    STICKY = "sticky"  # its conversation began on it, or the other attempts of its episode's group did
    REQUESTED = "requested"  # the request named it: policy@v12, policy@previous, …


class ResponseParams(TypedDict, total=False):
    """What a request of the Responses API has beside the equivalent chat request."""

    has_instructions: bool
    previous_response_id: str


class RequestParams(TypedDict, total=False):
    """Parameters of a reply beside its messages and its sampling; what is not given is left out."""

    tools: list[dict[str, object]]
    tool_choice: str | dict[str, object]
    parallel_tool_calls: bool
    response_format: dict[str, object]
    logprobs: bool
    top_logprobs: int
    n: int
    task: str  # of a front end's background task: which
    overridden_sampling: dict[str, object]  # the values that the request asked for
    response: ResponseParams


class Turn(Entity, Base):
    """Each choice of a completion is a turn. The id of the first one is the chat completion id."""

    __tablename__ = "turns"

    project_id: Mapped[str] = mapped_column(ForeignKey("projects.id"))
    policy_id: Mapped[str] = mapped_column(ForeignKey("policies.id"))
    version_id: Mapped[str] = mapped_column(ForeignKey("versions.id"))
    completion_id: Mapped[str] = mapped_column(String(48), nullable=True)
    choice_index: Mapped[int] = mapped_column(default=0, server_default=text("0"))
    route_reason: Mapped[str] = mapped_column(String(16), default=RouteReason.STABLE, server_default=RouteReason.STABLE)
    origin: Mapped[str] = mapped_column(String(16), default=Origin.CHAT, server_default=Origin.CHAT)
    conversation_id: Mapped[str | None] = mapped_column(String(255), doc="the caller's, or one that was generated")
    parent_id: Mapped[str | None] = mapped_column(String(48), index=True, doc="the turn before, in this conversation")
    episode_id: Mapped[str | None] = mapped_column(String(48), doc="the episode of an agent that it belongs to")
    episode_step: Mapped[int | None] = mapped_column(
        doc="1 for the first completion of its episode; its choices share it"
    )
    agent: Mapped[str | None] = mapped_column(String(63), doc="the agent's role in the episode, as its client names it")
    state_key: Mapped[str | None] = mapped_column(
        String(512), doc="the state of the environment that its client names: turns in equal states are compared"
    )
    trace_id: Mapped[str | None] = mapped_column(String(32), doc="of the request's `traceparent`")
    span_id: Mapped[str | None] = mapped_column(String(16), doc="of the request's `traceparent`: its caller's span")
    shadow_of_id: Mapped[str | None] = mapped_column(
        String(48), doc="of a shadow: the chat turn whose prompt it answers"
    )
    prefix_reuse: Mapped[str | None] = mapped_column(
        doc="'exact' when the prompt begins with the parent's tokens, otherwise why not; null without a parent"
    )
    prefix_hash: Mapped[str | None] = mapped_column(String(64), doc="hash of all messages including the reply")
    key_id: Mapped[str | None] = mapped_column(String(48), doc="the API key of the request")
    end_user: Mapped[str | None] = mapped_column(String(512), doc="`safety_identifier` or `user` of the request")
    request_sha256: Mapped[str | None] = mapped_column(String(64), doc="of the body, to recognize a retry")
    request_metadata: Mapped[dict[str, str]] = mapped_column(
        default=dict, server_default=text("'{}'"), doc="the caller's metadata"
    )
    engine: Mapped[str] = mapped_column(String(63))
    state: Mapped[str] = mapped_column(String(16), default=TurnState.OPEN)
    stream: Mapped[bool]
    history_id: Mapped[str | None] = mapped_column(
        String(48), doc="the turn whose messages and tokens begin this turn's prompt; see app/chat/histories.py"
    )
    num_history_messages: Mapped[int] = mapped_column(
        default=0, server_default=text("0"), doc="how many messages of the prompt are stored with `history_id`"
    )
    num_history_tokens: Mapped[int] = mapped_column(
        default=0, server_default=text("0"), doc="how many tokens of the prompt are stored with `history_id`"
    )
    own_messages: Mapped[list[dict[str, object]]] = mapped_column(
        "messages", key="own_messages", doc="those after the history's"
    )
    sampling: Mapped[dict[str, object]]
    request_params: Mapped[RequestParams] = mapped_column(
        Json,
        default=dict,
        server_default=text("'{}'"),
        doc="other parameters of the reply: tools, tool_choice, response_format, …",
    )
    own_prompt_ids: Mapped[list[int] | None] = mapped_column(
        "prompt_ids", TokenIds, key="own_prompt_ids", doc="those after the history's"
    )
    output_ids: Mapped[list[int] | None] = mapped_column(TokenIds)
    logprobs: Mapped[list[float] | None] = mapped_column(Logprobs, doc="one per output token")
    reply: Mapped[AssistantMessage | None] = mapped_column(Json, doc="the assistant's message as sent")
    finish_reason: Mapped[str | None] = mapped_column(String(32))
    num_prompt_tokens: Mapped[int | None]
    num_output_tokens: Mapped[int | None]
    length_penalty: Mapped[float | None] = mapped_column(
        doc="below 0 when the length is out of range; null when no range is set or the reply was not finished"
    )
    weight_versions: Mapped[list[dict[str, object]] | None] = mapped_column(
        JSON(none_as_null=True).with_variant(JSONB(none_as_null=True), "postgresql"),
        doc="with full weights, if the engine reports them: spans of output tokens, {version, start, end}",
    )
    exclusion_reason: Mapped[str | None] = mapped_column(doc="why it must not be trained on; null when it may")
    first_token_at: Mapped[float | None]
    finished_at: Mapped[float | None]
    processed: Mapped[bool] = mapped_column(
        default=False, server_default=false(), doc="the reward sources that need no feedback have been requested"
    )
    deleted_at: Mapped[float | None] = mapped_column(doc="when its content was erased; the row remains")

    @property
    def num_messages(self) -> int:
        """The number of messages of the prompt."""
        return self.num_history_messages + len(self.own_messages)

    __table_args__ = (
        Index("ix_turns_completion_id_choice_index", "completion_id", "choice_index", unique=True),
        Index("ix_turns_project_id_conversation_id", "project_id", "conversation_id", "created_at"),
        Index("ix_turns_version_id_created_at", "version_id", "created_at"),
        Index("ix_turns_project_id_prefix_hash", "project_id", "prefix_hash"),
        Index("ix_turns_key_id_request_sha256", "key_id", "request_sha256"),
        Index("ix_turns_project_id_created_at", "project_id", "created_at"),
        partial_index("ix_turns_chats_of_policy", "policy_id", "created_at", where="origin = 'chat'"),
        Index("ix_turns_state", "state"),
        partial_index("ix_turns_of_end_user", "project_id", "end_user", "created_at", where="end_user IS NOT NULL"),
        partial_index("ix_turns_with_content", "project_id", "created_at", "id", where="deleted_at IS NULL"),
        partial_index("ix_turns_shadow_of_id", "shadow_of_id", where="shadow_of_id IS NOT NULL"),
        partial_index("ix_turns_of_episode", "episode_id", "episode_step", where="episode_id IS NOT NULL"),
        partial_index("ix_turns_trace_id", "project_id", "trace_id", "created_at", where="trace_id IS NOT NULL"),
        partial_index("ix_turns_history_id", "history_id", where="history_id IS NOT NULL"),
        Index(
            "ix_turns_project_id_finished_at",
            *("project_id", "finished_at"),
            postgresql_where=text("NOT processed"),
            sqlite_where=text("processed = 0"),
        ),
    )


class TurnMetadata(Base):
    """One key and value of a turn's metadata, to find it by. Only the first choice of a completion has them."""

    __tablename__ = "turn_metadata"

    turn_id: Mapped[str] = mapped_column(ForeignKey("turns.id", ondelete="CASCADE"), primary_key=True)
    key: Mapped[str] = mapped_column(String(64), primary_key=True)
    value: Mapped[str] = mapped_column(String(512))
    project_id: Mapped[str] = mapped_column(ForeignKey("projects.id"))

    __table_args__ = (Index("ix_turn_metadata_project_id_key_value", "project_id", "key", "value"),)


MAX_LOCKED = 10_000  # in a statement: SQLite allows it 32,766 parameters


async def lock_turns(session: AsyncSession, turn_ids: Collection[str], *, key_share: bool = False) -> None:
    """Lock turns before the rows that refer to them.

    They are locked in the order of their ids, so that two transactions cannot deadlock.

    With `key_share` other transactions may still add rows that refer to them.
    """
    ordered = sorted(turn_ids)
    for start in range(0, len(ordered), MAX_LOCKED):
        are_chosen = Turn.id.in_(ordered[start : start + MAX_LOCKED])
        await session.execute(select(Turn.id).where(are_chosen).order_by(Turn.id).with_for_update(key_share=key_share))
