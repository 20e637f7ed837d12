"""Fields that all kinds of feedback share, and the views of feedback."""

from typing import Annotated, Any, Literal, Self

from fastapi import Path
from pydantic import AfterValidator, BaseModel, BeforeValidator, Field, StrictInt, StringConstraints, model_validator

from alignment.json_values import JsonObject
from app.core.http import StrictModel
from app.core.pagination import Page
from app.models import SourceKind, to_completion_id

# A completion may be named by the id of its request or its response, too.
CompletionId = Annotated[str, StringConstraints(min_length=1, max_length=255), AfterValidator(to_completion_id)]
RequestId = Annotated[str, StringConstraints(min_length=1, max_length=255)]
ConversationId = Annotated[str, StringConstraints(min_length=1, max_length=255)]
EpisodeId = Annotated[str, StringConstraints(min_length=1, max_length=48)]
FeedbackId = Annotated[str, Path(min_length=1, max_length=48)]  # of a route
ChoiceIndex = Annotated[StrictInt, Field(ge=0, le=127)]
Name = Annotated[str, StringConstraints(min_length=1, max_length=63, pattern=r"^[\w.-]+$")]
ClientId = Annotated[str, StringConstraints(min_length=1, max_length=255)]
SenderKey = Annotated[str, StringConstraints(min_length=1, max_length=255)]
SentAt = Annotated[float, Field(strict=True, ge=0, lt=1e11, allow_inf_nan=False)]
SourceId = Annotated[str, StringConstraints(min_length=1, max_length=255)]
Key = Annotated[str, StringConstraints(max_length=64)]
Metadata = dict[Key, Annotated[str, StringConstraints(max_length=512)]]
WITHDRAWAL = "withdrawal"
OutcomeState = Literal["learned", "waiting", "not_learned"]


class Source(StrictModel):
    kind: SourceKind = SourceKind.HUMAN
    id: SourceId | None = None


def to_source(value: object) -> object:
    """Return the source for the id of a person. Example: "user-7" -> {"id": "user-7"}."""
    return {"id": value} if isinstance(value, str) else value


AnySource = Annotated[Source, BeforeValidator(to_source, json_schema_input_type=Source | SourceId)]


class Choice(StrictModel):
    """One reply. `choice_index` selects one of several choices of the completion."""

    completion_id: CompletionId
    choice_index: ChoiceIndex = 0


class ConversationTarget(StrictModel):
    """A conversation as a whole, or one of its turns.

    The number of a turn is that of the reply in the conversation: a repeated or regenerated reply has the number of the
    one that it replaces, and the newest one is the target.
    """

    conversation_id: ConversationId
    turn: Annotated[StrictInt, Field(ge=-1, le=100_000)] | None = Field(
        None, description="1 is the first reply, -1 the newest one; left out, the whole conversation is meant"
    )
    choice_index: ChoiceIndex | None = None

    @model_validator(mode="after")
    def check_turn(self) -> Self:
        if self.turn == 0:
            raise ValueError("turn: 1 is the first reply, -1 the newest one")
        if self.choice_index is not None and self.turn is None:
            raise ValueError("'choice_index' requires 'turn'")
        return self


class EpisodeTarget(StrictModel):
    """An episode as a whole: its outcome, or what somebody says of it later."""

    episode_id: EpisodeId


class MetadataTarget(StrictModel):
    """Pairs of the chat request's `metadata`. All must match. The newest matching turn that may be trained on is the
    target; without one, the newest that may not."""

    metadata: Metadata = Field(min_length=1, max_length=16)


class OutcomeView(BaseModel):
    """What has become of feedback. Exactly one of `waiting_for` and `rule` is set unless it is learned from."""

    state: OutcomeState
    waiting_for: str | None = Field(description="while it waits: for what")
    rule: str | None = Field(description="the rule by which it is not learned from")
    version: str | None = Field(description="the version that learned from it, released or not")
    batch: str | None = Field(description="the batch that learns or has learned from it")
    until: float | None = Field(description="when the wait for other reward sources ends")
    text_rule: str | None = Field(None, description="of a correction: the rule by which its text is not learned from")
    sentence: str


class FeedbackView(BaseModel):
    """`value` is the feedback as a number (null for kinds without one), `raw_value` the value as sent."""

    object: Literal["feedback"] = "feedback"
    id: str
    completion_id: str | None = Field(
        description="null for feedback about a conversation or an episode, a comparison or a ranking"
    )
    choice_index: int | None
    conversation_id: str | None = Field(description="set for feedback about the conversation as a whole")
    episode_id: str | None = Field(None, description="set for feedback about the episode as a whole")
    kind: str
    value: float | None
    raw_value: Any
    name: str
    comment: str | None
    source: Source
    metadata: JsonObject
    created_at: float
    trainable: bool | None = Field(
        None,
        description="only when submitted: whether it can give a reward, as far as its replies and its kind tell; null "
        "for a conversation, for an episode and for a label, which depends on the policy's settings",
    )
    exclusion_reason: str | None = Field(None, description="only when submitted: why it is not trainable")
    effective: bool | None = Field(
        None, description="neither withdrawn nor replaced by later feedback of its source; when read or sent again"
    )
    withdrawn: bool | None = Field(None, description="when read or sent again")
    outcome: OutcomeView | None = Field(None, description="what has become of it; only when read")


class FeedbackPage(Page[FeedbackView]):
    pass


class FeedbackBatch(StrictModel):
    """Each item is validated on its own, as a body of `POST /v1/feedback`."""

    items: list[Any] = Field(min_length=1, max_length=1000)


class BatchResult(BaseModel):
    index: int
    status: int
    feedback: FeedbackView | None = None
    error: JsonObject | None = None


class BatchResults(BaseModel):
    object: Literal["list"] = "list"
    data: list[BatchResult]
