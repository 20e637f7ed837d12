"""What feedback carries whatever its kind, and what it looks like when it is read back."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StrictInt, StringConstraints

from app.core.pagination import Page


def completion_id(id: Any) -> Any:
    """A response of /v1/responses is a completion under another prefix: resp_9f… is chatcmpl-9f…"""
    return "chatcmpl-" + id.removeprefix("resp_") if isinstance(id, str) and id.startswith("resp_") else id


CompletionId = Annotated[str, BeforeValidator(completion_id), StringConstraints(min_length=1, max_length=255)]
ConversationId = Annotated[str, StringConstraints(min_length=1, max_length=255)]
ChoiceIndex = Annotated[StrictInt, Field(ge=0, le=127)]
Name = Annotated[str, StringConstraints(min_length=1, max_length=63, pattern=r"^[\w.-]+$")]
OwnId = Annotated[str, StringConstraints(min_length=1, max_length=255)]
SourceId = Annotated[str, StringConstraints(min_length=1, max_length=255)]
Key = Annotated[str, StringConstraints(max_length=64)]
Pairs = dict[Key, Annotated[str, StringConstraints(max_length=512)]]
WITHDRAWAL = "withdrawal"


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Source(Strict):
    kind: Literal["HUMAN", "LLM_JUDGE", "CODE"] = "HUMAN"
    id: SourceId | None = None


class Choice(Strict):
    """One reply. Of a completion with several choices, `choice_index` says which."""

    completion_id: CompletionId
    choice_index: ChoiceIndex = 0


class ConversationTarget(Strict):
    conversation_id: ConversationId


class MetadataTarget(Strict):
    """Pairs that were given as `metadata` of the chat request. All must match; of several turns the newest counts."""

    metadata: Pairs = Field(min_length=1, max_length=16)


class FeedbackView(BaseModel):
    """`value` is the number that was understood (null for kinds without one), `said` the value as it was sent."""

    object: Literal["feedback"] = "feedback"
    id: str
    completion_id: str | None = Field(description="null when it is about a conversation, a comparison or a ranking")
    choice_index: int | None
    conversation_id: str | None = Field(description="set when it is about the conversation as a whole")
    kind: str
    value: float | None
    raw_value: Any
    name: str
    comment: str | None
    source: Source
    metadata: dict[str, Any]
    created_at: float
    counts: bool | None = Field(None, description="no later word of this source has replaced it; on reads only")
    withdrawn: bool | None = Field(None, description="on reads only")


class FeedbackPage(Page[FeedbackView]):
    pass


class FeedbackBatch(Strict):
    """Each item is read on its own, as a body of `POST /v1/feedback`."""

    items: list[Any] = Field(min_length=1, max_length=1000)


class BatchResult(BaseModel):
    index: int
    status: int
    feedback: FeedbackView | None = None
    error: dict[str, Any] | None = None


class BatchAnswer(BaseModel):
    object: Literal["list"] = "list"
    data: list[BatchResult]


def seen(row: dict[str, Any], choice: tuple[str, int] | None, **more: bool) -> dict[str, Any]:
    """A FeedbackView as plain JSON: this is on the way of every acknowledgement."""
    return {
        "object": "feedback",
        "id": row["id"],
        "completion_id": choice[0] if choice else None,
        "choice_index": choice[1] if choice else None,
        "conversation_id": row["conversation_id"],
        "kind": row["kind"],
        "value": row["value"],
        "raw_value": row["raw_value"],
        "name": row["name"],
        "comment": row["comment"],
        "source": {"kind": row["source_kind"], "id": row["source_id"]},
        "metadata": row["request_metadata"],
        "created_at": row["created_at"],
        **more,
    }
