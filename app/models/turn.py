"""Turn: one reply of the model, in tokens, exactly as the engine saw and said it."""

from enum import StrEnum
from typing import Any

from sqlalchemy import Boolean, Float, ForeignKey, Index, Integer, String, Text
from sqlalchemy.orm import Mapped, mapped_column

from app.models.base import Base, Created, Json, Logprobs, TokenIds

SERVER_LOST = "server_lost"  # the finish reason of a turn whose process died


class TurnState(StrEnum):
    OPEN = "open"  # being generated: the row exists before the first byte leaves
    DONE = "done"
    ABORTED = "aborted"  # the client hung up, or the process died
    FAILED = "failed"  # the engine failed


class Turn(Created, Base):
    """Its id is the chat completion id."""

    __tablename__ = "turns"

    id: Mapped[str] = mapped_column(String(48), primary_key=True)
    project_id: Mapped[str] = mapped_column(ForeignKey("projects.id"))
    policy_id: Mapped[str] = mapped_column(ForeignKey("policies.id"))
    version_id: Mapped[str] = mapped_column(ForeignKey("versions.id"), index=True)
    engine: Mapped[str] = mapped_column(String(63))
    state: Mapped[str] = mapped_column(String(16), default=TurnState.OPEN)
    stream: Mapped[bool] = mapped_column(Boolean)
    messages: Mapped[list[dict[str, Any]]] = mapped_column(Json)
    sampling: Mapped[dict[str, Any]] = mapped_column(Json)
    prompt_ids: Mapped[list[int] | None] = mapped_column(TokenIds)
    output_ids: Mapped[list[int] | None] = mapped_column(TokenIds)
    logprobs: Mapped[list[float] | None] = mapped_column(Logprobs, doc="one per output token")
    reply: Mapped[dict[str, Any] | None] = mapped_column(Json, doc="the assistant's message as sent")
    finish_reason: Mapped[str | None] = mapped_column(String(32))
    num_prompt_tokens: Mapped[int | None] = mapped_column(Integer)
    num_output_tokens: Mapped[int | None] = mapped_column(Integer)
    flaw: Mapped[str | None] = mapped_column(Text, doc="why it must not be trained on; null when it may")
    first_token_at: Mapped[float | None] = mapped_column(Float)
    finished_at: Mapped[float | None] = mapped_column(Float)

    __table_args__ = (
        Index("ix_turns_project_id_created_at", "project_id", "created_at"),
        Index("ix_turns_state", "state"),
    )
