"""The eight kinds of feedback and their targets. `KINDS` lists them all."""

from collections.abc import Iterator, Mapping
from typing import Annotated, ClassVar, Literal, Self, TypeAlias, get_args

from pydantic import (
    ConfigDict,
    Discriminator,
    Field,
    RootModel,
    StringConstraints,
    Tag,
    field_validator,
    model_validator,
)

from alignment.tolerance import snap_to_zero
from app.core.errors import BadRequest
from app.core.http import StrictModel, parse_body
from app.feedback.schemas import (
    AnySource,
    Choice,
    ChoiceIndex,
    ClientId,
    CompletionId,
    ConversationTarget,
    EpisodeTarget,
    Metadata,
    MetadataTarget,
    Name,
    RequestId,
    SenderKey,
    SentAt,
    Source,
)
from app.models import to_completion_id

MAX_RANKED = 16
ScaleNumber = Annotated[float, Field(strict=True, ge=-1e9, le=1e9)]


def _target_tag(target: object) -> str:
    """Return the tag of a target's type."""
    if isinstance(target, dict):
        return next((key for key in ("conversation_id", "episode_id", "metadata") if key in target), "completion_id")
    return "completion_id"


Target: TypeAlias = Annotated[
    Annotated[Choice, Tag("completion_id")]
    | Annotated[ConversationTarget, Tag("conversation_id")]
    | Annotated[EpisodeTarget, Tag("episode_id")]
    | Annotated[MetadataTarget, Tag("metadata")],
    Discriminator(_target_tag),
]

AnyTarget: TypeAlias = Choice | ConversationTarget | EpisodeTarget | MetadataTarget


class FeedbackCreate(StrictModel):
    """The fields that all kinds share."""

    kind: str
    id: ClientId | None = Field(None, description="an id chosen by the client; it makes retries safe")
    key: SenderKey | None = Field(
        None,
        description="the sender's own id of this feedback; new content under the same key replaces the earlier one",
    )
    sent_at: SentAt | None = Field(
        None,
        description="when the sender changed it, in seconds since the epoch: an older change of the key is refused",
    )
    name: Name = "default"
    comment: str | None = Field(None, max_length=10_000)
    source: AnySource = Source()
    metadata: Metadata = Field(default_factory=dict, max_length=16)

    @model_validator(mode="after")
    def check_key(self) -> Self:
        if self.id is not None and self.key is not None:
            raise ValueError("give either 'id', for feedback that never changes, or 'key', for feedback that may")
        if self.sent_at is not None and self.key is None:
            raise ValueError("'sent_at' requires 'key'")
        return self

    def reward_value(self) -> float | None:
        """Return the feedback as a number in [-1, 1]; None for a kind without one."""
        return None

    def get_target(self) -> AnyTarget | None:
        """Return the target; None when the value itself names the turns."""
        return None

    def ranked_choices(self) -> Iterator[tuple[int, Choice]]:
        """Yield the turns that the value puts in order, with their ranks; rank 0 is the best."""
        return iter(())


class TargetedFeedback(FeedbackCreate):
    """Feedback with one target, named by `completion_id` or `request_id` (with `choice_index`), or by `target`."""

    model_config = ConfigDict(
        json_schema_extra={
            "oneOf": [{"required": ["completion_id"]}, {"required": ["request_id"]}, {"required": ["target"]}],
            "dependentSchemas": {"choice_index": {"not": {"required": ["target"]}}},
        }
    )

    completion_id: CompletionId | None = None
    request_id: RequestId | None = Field(None, description="the header x-request-id of the chat's response")
    choice_index: ChoiceIndex | None = None
    target: Target | None = None

    @model_validator(mode="after")
    def check_target(self) -> Self:
        if [self.completion_id, self.request_id, self.target].count(None) != 2:
            raise ValueError("give one of 'completion_id', 'request_id' and 'target'")
        if self.choice_index is not None and self.target is not None:
            raise ValueError("'choice_index' requires 'completion_id'; inside 'target' it is a field of the target")
        return self

    def get_target(self) -> AnyTarget:
        if self.target is not None:
            return self.target
        completion_id = self.completion_id or to_completion_id(self.request_id or "")
        return Choice.model_construct(completion_id=completion_id, choice_index=self.choice_index or 0)


def _binary_tag(value: object) -> str | None:
    if isinstance(value, bool):
        return "bool"
    if isinstance(value, str):
        return "word" if value in ("up", "down") else None
    return "number" if isinstance(value, int | float) and value in (1, -1) else None


BinaryValue: TypeAlias = Annotated[
    Annotated[bool, Field(strict=True), Tag("bool")]
    | Annotated[Literal["up", "down"], Tag("word")]
    | Annotated[Literal[1, -1], Tag("number")],
    Discriminator(
        _binary_tag,
        custom_error_type="binary_value",
        custom_error_message="expected true, false, 'up', 'down', 1 or -1; a number on a scale is of the kind 'rating'",
    ),
]


class Binary(TargetedFeedback):
    """Thumbs up (true, "up" or 1) or thumbs down (false, "down" or -1)."""

    kind: Literal["binary"]
    value: BinaryValue

    def reward_value(self) -> float:
        return 1.0 if self.value in (True, "up") else -1.0


class Rating(TargetedFeedback):
    """A number on a scale, such as 1 to 5 stars. Stored as a number between -1 (the lowest) and 1 (the highest)."""

    kind: Literal["rating"]
    value: ScaleNumber
    scale: tuple[ScaleNumber, ScaleNumber] = (1.0, 5.0)

    @model_validator(mode="after")
    def check_scale(self) -> Self:
        low, high = self.scale
        if not low < high:
            raise ValueError("scale: the first number must be lower than the second")
        if not low <= self.value <= high:
            raise ValueError(f"value: {self.value} is not between {low} and {high}")
        return self

    def reward_value(self) -> float:
        """Return the position on the scale. Example: 4 on (1, 5) -> 0.5"""
        low, high = self.scale
        return snap_to_zero(2 * (self.value - low) / (high - low) - 1)


class Score(TargetedFeedback):
    """A number between -1 and 1."""

    kind: Literal["score"]
    value: Annotated[float, Field(strict=True, ge=-1, le=1, allow_inf_nan=False)]

    def reward_value(self) -> float:
        return snap_to_zero(self.value)


class Correction(TargetedFeedback):
    """A better answer, as text: all of it, not only what changes."""

    kind: Literal["correction"]
    value: Annotated[str, StringConstraints(min_length=1, max_length=100_000)]

    @field_validator("value")
    @classmethod
    def check_text(cls, value: str) -> str:
        if not value.strip():
            raise ValueError("the corrected text is empty; send the whole better answer")
        return value


class Comment(TargetedFeedback):
    """A text."""

    kind: Literal["comment"]
    value: Annotated[str, StringConstraints(min_length=1, max_length=10_000)]


class Categorical(TargetedFeedback):
    """A label."""

    kind: Literal["categorical"]
    value: Annotated[str, StringConstraints(min_length=1, max_length=255)]


def _ranked_item_tag(item: object) -> str:
    if isinstance(item, list):
        return "tie"
    return "choice" if isinstance(item, dict) else "id"


Reference: TypeAlias = Annotated[
    Annotated[CompletionId, Tag("id")] | Annotated[Choice, Tag("choice")],
    Discriminator(
        _ranked_item_tag,
        custom_error_type="nested_tie",
        custom_error_message="expected a completion's id, or an object with completion_id; a tie holds no other tie",
    ),
]
Tie: TypeAlias = Annotated[list[Reference], Field(min_length=2, max_length=MAX_RANKED)]
RankedItem: TypeAlias = Annotated[
    Annotated[CompletionId, Tag("id")] | Annotated[Choice, Tag("choice")] | Annotated[Tie, Tag("tie")],
    Discriminator(_ranked_item_tag),
]


class OrderedFeedback(FeedbackCreate):
    """An order of turns, the best first; a nested list is a tie. The value names the turns, so there is no target."""

    value: Annotated[list[RankedItem], Field(min_length=1, max_length=MAX_RANKED)]
    max_completions: ClassVar[int] = MAX_RANKED
    size_description: ClassVar[str] = f"2 to {MAX_RANKED} completions"

    @model_validator(mode="after")
    def check_completions(self) -> Self:
        named = [(choice.completion_id, choice.choice_index) for _, choice in self.ranked_choices()]
        if not 2 <= len(named) <= self.max_completions:
            raise ValueError(f"value: a {self.kind} takes {self.size_description}, not {len(named)}")
        if len(set(named)) < len(named):
            raise ValueError("value: a completion is named twice")
        return self

    def ranked_choices(self) -> Iterator[tuple[int, Choice]]:
        for rank, item in enumerate(self.value):
            for choice in item if isinstance(item, list) else [item]:
                yield rank, Choice(completion_id=choice) if isinstance(choice, str) else choice


class Comparison(OrderedFeedback):
    """Two completions, the better one first."""

    kind: Literal["comparison"]
    max_completions: ClassVar[int] = 2
    size_description: ClassVar[str] = "two completions"


class Ranking(OrderedFeedback):
    """Two to sixteen completions, best first."""

    kind: Literal["ranking"]


AnyFeedback: TypeAlias = Binary | Rating | Score | Comparison | Ranking | Correction | Comment | Categorical
KINDS: dict[str, type[FeedbackCreate]] = {
    get_args(model.model_fields["kind"].annotation)[0]: model for model in get_args(AnyFeedback)
}


class FeedbackRequest(RootModel[Annotated[AnyFeedback, Field(discriminator="kind")]]):
    """One piece of feedback, of one of eight kinds."""


def parse_feedback(body: Mapping[str, object]) -> FeedbackCreate:
    """Return the request, validated by the model of its kind, so that errors name fields as the client does."""
    kind = body.get("kind")
    model = KINDS.get(kind) if isinstance(kind, str) else None
    if model is None:
        problem = "'kind' is required" if kind is None else "There is no such 'kind'"
        raise BadRequest(f"{problem}: {', '.join(KINDS)}.", param="kind", code="invalid_value")
    return parse_body(model, body)
