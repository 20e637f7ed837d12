"""How long data is kept. Times are in days, and `versions` and `optimizer_states` are numbers of versions."""

from typing import Annotated, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

MAX_DAYS = 36_500
MAX_COUNT = 1_000_000


def _zero_to_none(value: object) -> object:
    return None if value == 0 and not isinstance(value, bool) else value


Days = Annotated[
    float | None,
    Field(gt=0, le=MAX_DAYS, allow_inf_nan=False),
    BeforeValidator(_zero_to_none, json_schema_input_type=Annotated[float, Field(ge=0, le=MAX_DAYS)] | None),
]
Count = Annotated[
    int | None,
    Field(ge=1, le=MAX_COUNT),
    BeforeValidator(_zero_to_none, json_schema_input_type=Annotated[int, Field(ge=0, le=MAX_COUNT)] | None),
]


class RetentionConfig(BaseModel):
    """What a project keeps. None, written as null or 0, is for ever."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    turns: Days = Field(90.0, description="messages, replies, tokens and metadata of turns, in days")
    feedback: Days = Field(
        365.0, description="comments, corrections and the sources of feedback and rewards, in days; at least `turns`"
    )
    audit: Days = Field(None, description="audit entries, in days")
    datasets: Days = Field(None, description="imported datasets, in days since the import")
    versions: Count = Field(200, description="the newest versions of each policy whose files are kept")
    optimizer_states: Count = Field(20, description="the newest versions of each policy whose trainer state is kept")

    @model_validator(mode="after")
    def _check_order(self) -> Self:
        """Feedback without its sources says nothing about a turn that may still be learned from."""
        if self.feedback is not None and (self.turns is None or self.feedback < self.turns):
            raise ValueError("feedback must be kept at least as long as turns")
        return self


class DeploymentRetention(RetentionConfig):
    """What a deployment keeps: the default of every project, and the logs, which belong to none."""

    logs: Days = Field(30.0, description="log files that nothing has been written to, in days")
