"""What chat says: completions as they are answered, and as they are kept."""

from collections.abc import Sequence
from typing import Any, Literal

from pydantic import BaseModel

from app.core.pagination import Page
from app.models import Policy, Turn, TurnState, Version
from app.policies.service import label


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class Choice(BaseModel):
    index: int
    message: dict[str, Any]
    logprobs: dict[str, Any] | None
    finish_reason: Literal["stop", "length", "tool_calls", "content_filter", "abort"]


class CompletionView(BaseModel):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[Choice]
    usage: Usage


class StoredChoice(Choice):
    length_penalty: float | None


class StoredCompletion(CompletionView):
    """OpenAI's stored completion, and how the turn ended. `choices` holds those that came to an end."""

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
        """`turns` are the completion's choices, in order."""
        first = turns[0]
        prompt = first.num_prompt_tokens or 0
        said = sum(turn.num_output_tokens or 0 for turn in turns)
        return cls(
            id=first.completion_id,
            created=int(first.created_at),
            model=label(policy, version),
            choices=[choice(turn) for turn in turns if turn.state == TurnState.DONE],
            usage=Usage(prompt_tokens=prompt, completion_tokens=said, total_tokens=prompt + said),
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


def choice(turn: Turn) -> StoredChoice:
    return StoredChoice(
        index=turn.choice_index,
        message={"refusal": None, **(turn.reply or {})},
        logprobs=None,
        finish_reason=turn.finish_reason,
        length_penalty=turn.length_penalty,
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


class Deleted(BaseModel):
    object: Literal["chat.completion.deleted"] = "chat.completion.deleted"
    id: str
    deleted: Literal[True] = True
