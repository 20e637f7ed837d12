"""Requests and views of episodes."""

from typing import Annotated, Literal, Self

from pydantic import BaseModel, Field, StrictInt, StringConstraints, model_validator

from app.chat.schemas import MetadataKey, MetadataValue
from app.core.http import StrictModel
from app.core.pagination import Page

HOUR, WEEK = 3600.0, 7 * 86_400.0
Task = Annotated[str, StringConstraints(min_length=1, max_length=255)]
PolicyName = Annotated[str, StringConstraints(min_length=1, max_length=63)]
Count = Annotated[StrictInt, Field(ge=1, le=1_000_000_000)]


class EpisodeLimits(StrictModel):
    """What ends an episode that its agent does not end."""

    idle_seconds: float = Field(900.0, gt=0, le=WEEK, description="it ends when none of its chats runs for so long")
    deadline_seconds: float = Field(HOUR, gt=0, le=WEEK, description="it ends so long after its creation at the latest")
    max_turns: Count | None = Field(None, description="most chat requests; null: no limit")
    max_tokens: Count | None = Field(None, description="most output tokens of all its chats; null: no limit")


class EpisodeRequest(StrictModel):
    policy: PolicyName = Field(description="the policy that all its chats name as `model`")
    task: Task | None = Field(None, description="a name of the task, to find its episodes by")
    metadata: dict[MetadataKey, MetadataValue] = Field(default_factory=dict, max_length=16)
    limits: EpisodeLimits = EpisodeLimits()


class EndRequest(StrictModel):
    outcome: Annotated[float, Field(strict=True, ge=-1, le=1, allow_inf_nan=False)] | None = Field(
        None, description="how the attempt went, from -1 to 1; without one nothing is learned from the end"
    )
    reason: Literal["completed", "failed", "abandoned"] = Field(
        "completed",
        description="`failed`: the agent gave up, or its program raised an error; `abandoned`: nobody can tell how it "
        "went, so there is no outcome",
    )

    @model_validator(mode="after")
    def check_outcome(self) -> Self:
        if self.reason == "abandoned" and self.outcome is not None:
            raise ValueError("outcome: an abandoned episode has none; end it as completed or failed")
        return self


class EpisodeView(BaseModel):
    object: Literal["episode"] = "episode"
    id: str
    policy: str
    task: str | None
    metadata: dict[str, str]
    state: Literal["open", "ended"]
    end_reason: str | None = Field(
        description="completed, failed or abandoned, as reported; idle_timeout, deadline, max_turns or max_tokens"
    )
    outcome: float | None
    start_version: str | None = Field(description="the version of its first chat; later ones may have newer versions")
    num_turns: int = Field(description="its chat requests")
    num_tokens: int = Field(description="output tokens of all of them")
    limits: EpisodeLimits
    created_at: float
    deadline_at: float
    ended_at: float | None


class NewEpisodeView(EpisodeView):
    api_key: str = Field(description="for the chats, the feedback and the end of this episode alone")
    base_url: str = Field(description="with the key, all that a client of OpenAI's API needs")


class EpisodeList(Page[EpisodeView]):
    pass
