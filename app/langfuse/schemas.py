"""Scores and events as Langfuse's clients send them. Fields that no feedback has are ignored."""

from datetime import UTC, datetime
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, RootModel, StrictBool, StrictFloat, StrictInt, StrictStr
from pydantic.alias_generators import to_camel

from app.core.errors import BadRequest
from app.core.http import parse_body

MAX_BATCH = 1000  # scores of a request, as of a batch of feedback
MAX_ID = 246  # of a score: "langfuse:" before it makes the key of its feedback, of 255 characters
MAX_NAME = 255
SCORE_EVENT = "score-create"
DataType = Literal["NUMERIC", "BOOLEAN", "CATEGORICAL", "TEXT", "CORRECTION"]
ScoreId = Annotated[str, Field(min_length=1, max_length=MAX_ID)]


class Score(BaseModel):
    """One score of Langfuse: a value with a name, about a trace, an observation in it, or a session."""

    model_config = ConfigDict(alias_generator=to_camel, extra="ignore")

    id: ScoreId | None = None
    trace_id: StrictStr | None = None
    observation_id: StrictStr | None = None
    session_id: StrictStr | None = None
    name: Annotated[str, Field(min_length=1, max_length=MAX_NAME)]
    value: StrictBool | StrictInt | StrictFloat | StrictStr
    data_type: DataType | None = None
    comment: StrictStr | None = None
    metadata: Any = Field(None, description="an object; names of the reply in it are looked for")
    timestamp: datetime | None = None

    @property
    def sent_at(self) -> float | None:
        """When the score was made, in seconds since the epoch; a time without a zone is UTC."""
        if self.timestamp is None:
            return None
        return (self.timestamp if self.timestamp.tzinfo else self.timestamp.replace(tzinfo=UTC)).timestamp()

    def find_metadata(self, *keys: str) -> str | None:
        """Return the first text in the score's metadata that has one of these keys; None without one."""
        values = self.metadata if isinstance(self.metadata, dict) else {}
        return next((value for key in keys if isinstance(value := values.get(key), str) and value), None)


class ScoreRequest(RootModel[Score | Annotated[list[object], Field(min_length=1, max_length=MAX_BATCH)]]):
    """A score, or an array of scores, each of which is validated on its own."""


class ScoreCreated(BaseModel):
    id: str


class ScoresAccepted(BaseModel):
    message: Literal["Accepted"] = "Accepted"


class BatchProblem(BaseModel):
    message: str


class ScoresPartlyAccepted(BaseModel):
    accepted: int
    rejected: int
    errors: list[BatchProblem]


class IngestionRequest(BaseModel):
    """A batch of events, each of which is validated on its own. Those of other types than scores are dropped."""

    batch: list[Any] = Field(max_length=MAX_BATCH)


class ScoreEvent(BaseModel):
    id: ScoreId
    type: Literal["score-create"]
    timestamp: datetime | None = None
    body: dict[str, object]

    def to_score(self) -> Score:
        """Return the score, with the event's id and time where it has none. Raises BadRequest."""
        score = parse_body(Score, self.body)
        # The event's time is that of the change; a score that is changed may keep its own.
        return score.model_copy(update={"id": score.id or self.id, "timestamp": self.timestamp or score.timestamp})


class EventResult(BaseModel):
    id: str
    status: int
    message: str | None = None
    error: str | None = None


class IngestionResults(BaseModel):
    successes: list[EventResult]
    errors: list[EventResult]


def parse_scores(body: object) -> Score | list[object]:
    """Return the score, or the items of an array. Raises BadRequest."""
    if isinstance(body, dict):
        return parse_body(Score, body)
    if not isinstance(body, list):
        raise BadRequest("The body must be a score, a JSON object, or an array of scores.", code="invalid_json")
    if not 1 <= len(body) <= MAX_BATCH:
        raise BadRequest(f"A request holds 1 to {MAX_BATCH} scores, and this one {len(body)}.", code="invalid_value")
    return body
