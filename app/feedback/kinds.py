"""The eight things that can be said, and about what. One visible table at the end."""

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal, Self, TypeAlias

from pydantic import ConfigDict, Discriminator, Field, RootModel, StringConstraints, Tag, model_validator

from app.core.errors import BadRequest
from app.core.http import parse_body
from app.feedback.schemas import (
    Choice,
    ChoiceIndex,
    CompletionId,
    ConversationTarget,
    MetadataTarget,
    Name,
    OwnId,
    Pairs,
    Source,
    Strict,
)

MOST_RANKED = 16
Bound = Annotated[float, Field(strict=True, ge=-1e9, le=1e9)]


def _kind_of_target(target: Any) -> str:
    """Tags begin with "~", to be told from field names in an error's path."""
    if isinstance(target, dict):
        return next((f"~{key}" for key in ("conversation_id", "metadata") if key in target), "~completion_id")
    return "~completion_id"


Target: TypeAlias = Annotated[
    Annotated[Choice, Tag("~completion_id")]
    | Annotated[ConversationTarget, Tag("~conversation_id")]
    | Annotated[MetadataTarget, Tag("~metadata")],
    Discriminator(_kind_of_target),
]


class FeedbackCreate(Strict):
    """What every kind has. `comment` may go with any of them."""

    kind: str
    id: OwnId | None = Field(None, description="the caller's own id: makes a retry safe")
    name: Name = "default"
    comment: str | None = Field(None, max_length=10_000)
    source: Source = Source()
    metadata: Pairs = Field(default_factory=dict, max_length=16)

    def number(self) -> float | None:
        """What it is worth between -1 and 1; None for a kind that is no number."""
        return None

    def about(self) -> Choice | ConversationTarget | MetadataTarget | None:
        """None when the value itself names the turns."""
        return None

    def ranks(self) -> Iterator[tuple[int, Choice]]:
        """The turns that the value puts in order, rank 0 first."""
        return iter(())


class OfTarget(FeedbackCreate):
    """Names its target, in one of two ways: `completion_id` (with `choice_index`) or `target`."""

    model_config = ConfigDict(
        json_schema_extra={
            "oneOf": [{"required": ["completion_id"]}, {"required": ["target"]}],
            "dependentRequired": {"choice_index": ["completion_id"]},
        }
    )

    completion_id: CompletionId | None = None
    choice_index: ChoiceIndex | None = None
    target: Target | None = None

    @model_validator(mode="after")
    def one_target(self) -> Self:
        if (self.completion_id is None) == (self.target is None):
            raise ValueError("give either 'completion_id' or 'target'")
        if self.choice_index is not None and self.completion_id is None:
            raise ValueError("'choice_index' goes with 'completion_id'; in a target, put it inside")
        return self

    def about(self) -> Choice | ConversationTarget | MetadataTarget:
        if self.target is not None:
            return self.target
        assert self.completion_id is not None
        return Choice.model_construct(completion_id=self.completion_id, choice_index=self.choice_index or 0)


Thumb: TypeAlias = Annotated[
    Annotated[bool, Field(strict=True), Tag("~bool")] | Annotated[Literal["up", "down"], Tag("~word")],
    Discriminator(lambda value: "~word" if isinstance(value, str) else "~bool"),
]


class Binary(OfTarget):
    """A thumb: true or "up", false or "down"."""

    kind: Literal["binary"]
    value: Thumb

    def number(self) -> float:
        return 1.0 if self.value in (True, "up") else -1.0


class Rating(OfTarget):
    """A number on a scale, such as 1 to 5 stars. Kept as its place between -1 (the lowest) and 1 (the highest)."""

    kind: Literal["rating"]
    value: Bound
    scale: tuple[Bound, Bound] = (1.0, 5.0)

    @model_validator(mode="after")
    def on_the_scale(self) -> Self:
        low, high = self.scale
        if not low < high:
            raise ValueError("scale: the lowest must be below the highest")
        if not low <= self.value <= high:
            raise ValueError(f"value: {self.value} is not between {low} and {high}")
        return self

    def number(self) -> float:
        """Example: 4 on (1, 5) -> 0.5"""
        low, high = self.scale
        return 2 * (self.value - low) / (high - low) - 1


class Score(OfTarget):
    """A number between -1 and 1."""

    kind: Literal["score"]
    value: Annotated[float, Field(strict=True, ge=-1, le=1, allow_inf_nan=False)]

    def number(self) -> float:
        return self.value


class Correction(OfTarget):
    """The better answer."""

    kind: Literal["correction"]
    value: Annotated[str, StringConstraints(min_length=1, max_length=100_000)]


class Comment(OfTarget):
    """Words alone."""

    kind: Literal["comment"]
    value: Annotated[str, StringConstraints(min_length=1, max_length=10_000)]


class Categorical(OfTarget):
    """A label."""

    kind: Literal["categorical"]
    value: Annotated[str, StringConstraints(min_length=1, max_length=255)]


def _kind_of_place(place: Any) -> str:
    if isinstance(place, list):
        return "~tie"
    return "~choice" if isinstance(place, dict) else "~id"


Reference: TypeAlias = Annotated[
    Annotated[CompletionId, Tag("~id")] | Annotated[Choice, Tag("~choice")], Discriminator(_kind_of_place)
]
Tie: TypeAlias = Annotated[list[Reference], Field(min_length=2, max_length=MOST_RANKED)]
Place: TypeAlias = Annotated[
    Annotated[CompletionId, Tag("~id")] | Annotated[Choice, Tag("~choice")] | Annotated[Tie, Tag("~tie")],
    Discriminator(_kind_of_place),
]


class Order(FeedbackCreate):
    """Puts turns in order, best first; a nested list is a tie. The value names the turns, so there is no target."""

    value: Annotated[list[Place], Field(min_length=1, max_length=MOST_RANKED)]
    most: ClassVar[int] = MOST_RANKED
    takes: ClassVar[str] = f"2 to {MOST_RANKED} completions"

    @model_validator(mode="after")
    def each_turn_once(self) -> Self:
        named = [(choice.completion_id, choice.choice_index) for _, choice in self.ranks()]
        if not 2 <= len(named) <= self.most:
            raise ValueError(f"value: a {self.kind} takes {self.takes}, not {len(named)}")
        if len(set(named)) < len(named):
            raise ValueError("value: a completion is named twice")
        return self

    def ranks(self) -> Iterator[tuple[int, Choice]]:
        for rank, place in enumerate(self.value):
            for one in place if isinstance(place, list) else [place]:
                yield rank, Choice(completion_id=one) if isinstance(one, str) else one


class Comparison(Order):
    """Two completions, the better one first."""

    kind: Literal["comparison"]
    most: ClassVar[int] = 2
    takes: ClassVar[str] = "two completions"


class Ranking(Order):
    """Two to sixteen completions, best first."""

    kind: Literal["ranking"]


KINDS: dict[str, type[FeedbackCreate]] = {
    "binary": Binary,
    "rating": Rating,
    "score": Score,
    "comparison": Comparison,
    "ranking": Ranking,
    "correction": Correction,
    "comment": Comment,
    "categorical": Categorical,
}
NUMBERS = ("binary", "rating", "score")
ORDERS = ("comparison", "ranking")


class FeedbackRequest(
    RootModel[
        Annotated[
            Binary | Rating | Score | Comparison | Ranking | Correction | Comment | Categorical,
            Field(discriminator="kind"),
        ]
    ]
):
    """One piece of feedback, of one of eight kinds."""


def read(body: dict[str, Any]) -> FeedbackCreate:
    """Straight to the model of its kind, so that errors name the field as the caller does."""
    kind = body.get("kind")
    model = KINDS.get(kind) if isinstance(kind, str) else None
    try:
        return parse_body(FeedbackRequest, body).root if model is None else parse_body(model, body)
    except BadRequest as error:
        raise _untagged(error) from error


def _untagged(error: BadRequest) -> BadRequest:
    """Example: "value.1.~tie.0.~id" -> "value.1.0"."""
    param = error.param or ""
    plain = ".".join(part for part in param.split(".") if not part.startswith("~"))
    message = error.message.replace(param, plain).removeprefix("Value error, ")
    return BadRequest(message, param=plain or None, code=error.code)
