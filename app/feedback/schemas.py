"""What a thumb looks like on the wire."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictFloat, StrictInt, field_validator, model_validator

from app.models import Feedback


class Source(BaseModel):
    model_config = ConfigDict(extra="forbid")

    kind: Literal["HUMAN", "LLM_JUDGE", "CODE"] = "HUMAN"
    id: str | None = Field(None, min_length=1, max_length=255)


class FeedbackRequest(BaseModel):
    """`binary` takes true or false (or "up" / "down"), `score` a number in [-1, 1]."""

    model_config = ConfigDict(extra="forbid")

    id: str | None = Field(None, min_length=1, max_length=255, description="the caller's own id: makes a retry safe")
    completion_id: str = Field(min_length=1, max_length=255)
    kind: Literal["binary", "score"]
    value: StrictBool | StrictInt | StrictFloat | Literal["up", "down"]
    name: str = Field("default", min_length=1, max_length=63, pattern=r"^[\w.-]+$")
    comment: str | None = Field(None, max_length=10_000)
    source: Source = Source()
    metadata: dict[str, str] = Field(default_factory=dict, max_length=16)

    @field_validator("metadata")
    @classmethod
    def small(cls, pairs: dict[str, str]) -> dict[str, str]:
        if any(len(key) > 64 or len(value) > 512 for key, value in pairs.items()):
            raise ValueError("keys hold at most 64 characters, values at most 512")
        return pairs

    @model_validator(mode="after")
    def sensible(self) -> "FeedbackRequest":
        if self.kind == "binary" and not (isinstance(self.value, bool) or self.value in ("up", "down")):
            raise ValueError('a binary value is true, false, "up" or "down"')
        if self.kind == "score":
            if isinstance(self.value, (bool, str)):
                raise ValueError("a score is a number in [-1, 1]")
            if not -1 <= self.value <= 1:
                raise ValueError(f"a score lies in [-1, 1], not at {self.value}")
        return self

    def number(self) -> float:
        """Example: "up" -> 1.0, False -> -1.0, 0.25 -> 0.25"""
        if self.kind == "score":
            return float(self.value)
        return 1.0 if self.value in (True, "up") else -1.0


class FeedbackView(BaseModel):
    object: Literal["feedback"] = "feedback"
    id: str
    completion_id: str
    kind: str
    value: float
    name: str
    comment: str | None
    source: Source
    metadata: dict[str, Any]
    created_at: float

    @classmethod
    def of(cls, row: Feedback) -> "FeedbackView":
        return cls(
            id=row.id,
            completion_id=row.turn_id,
            kind=row.kind,
            value=row.value,
            name=row.name,
            comment=row.comment,
            source=Source.model_validate({"kind": row.source_kind, "id": row.source_id}),
            metadata=row.details,
            created_at=row.created_at,
        )
