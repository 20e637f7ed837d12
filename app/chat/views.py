"""Stored completions and their messages as the API shows them."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from fastapi import Path
from pydantic import AfterValidator, BaseModel

from app.chat.schemas import Choice, CompletionView, Usage
from app.core.pagination import Page
from app.models import Policy, Turn, TurnState, Version, to_completion_id
from app.policies.references import version_name

CompletionId = Annotated[str, Path(min_length=1, max_length=255), AfterValidator(to_completion_id)]


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
