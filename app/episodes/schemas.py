"""Requests and views of episodes."""

from typing import Annotated, Literal, Self

from pydantic import AfterValidator, BaseModel, Field, StrictInt, StringConstraints, model_validator

from app.chat.schemas import MetadataKey, MetadataValue
from app.chat.traces import TRACE_PATTERN, is_trace_id, parse_traceparent
from app.core.http import StrictModel
from app.core.pagination import Page
from app.episodes.graph import GraphTurn
from app.models import LOST_REASONS
from app.training.episode_groups import MAX_SIZE

HOUR, WEEK = 3600.0, 7 * 86_400.0
Task = Annotated[str, StringConstraints(min_length=1, max_length=255)]
PolicyName = Annotated[str, StringConstraints(min_length=1, max_length=63)]


def to_trace_id(value: str) -> str:
    """Return the trace id that this is, or that this `traceparent` names. Raises ValueError."""
    trace = parse_traceparent(value)
    if trace is None and not is_trace_id(value):
        raise ValueError(
            "a trace id has 32 hexadecimal digits in lower case, not all zero; or send a complete traceparent"
        )
    return value if trace is None else trace.trace_id


TraceId = Annotated[str, AfterValidator(to_trace_id), Field(json_schema_extra={"pattern": TRACE_PATTERN})]
Count = Annotated[StrictInt, Field(ge=1, le=1_000_000_000)]


class EpisodeLimits(StrictModel):
    """What ends an episode that its agent does not end."""

    idle_seconds: float = Field(900.0, gt=0, le=WEEK, description="it ends when none of its chats runs for so long")
    deadline_seconds: float = Field(HOUR, gt=0, le=WEEK, description="it ends so long after its creation at the latest")
    max_turns: Count | None = Field(None, description="most chat requests; null: no limit")
    max_tokens: Count | None = Field(None, description="most output tokens of all its chats; null: no limit")


class EpisodeGroup(StrictModel):
    """Attempts at the same task, whose outcomes are compared with each other."""

    id: Task = Field(description="a name that all attempts have in common")
    size: int = Field(ge=2, le=MAX_SIZE, strict=True, description="how many attempts are planned")


class EpisodeRequest(StrictModel):
    policy: PolicyName = Field(description="the policy that all its chats name as `model`")
    task: Task | None = Field(None, description="a name of the task, to find its episodes by")
    trace_id: TraceId | None = Field(
        None,
        description="a trace of W3C's Trace Context, as its id or as a `traceparent`: chats of the policy that send a "
        "`traceparent` of this trace belong to the episode, unless they name another one",
    )
    metadata: dict[MetadataKey, MetadataValue] = Field(default_factory=dict, max_length=16)
    group: EpisodeGroup | None = Field(
        None, description="the attempts that it belongs to: all of one policy and one task, started on one version"
    )
    limits: EpisodeLimits = EpisodeLimits()
    sampling: Literal["request", "policy"] = Field(
        "request",
        description="`policy`: replies are sampled at temperature 1 from all tokens, without penalties, whatever a "
        "request asks, so that they can be trained on; the header `x-attune-sampling` says what was replaced",
    )
    version: Literal["follow", "leash", "pin"] = Field(
        "follow",
        description="which version answers after the first chat: `follow`, the one that the deployment serves; `leash` "
        "that of the first chat while an engine has it and it is not more than `trainer.max_staleness` behind; `pin`, "
        "that of the first chat alone",
    )
    service_tier: Literal["auto", "default", "flex"] = Field(
        "auto",
        description="`flex`: engines serve its chats behind all others; `default`: like them; `auto`: as each request "
        "asks by its own `service_tier`",
    )


class EndRequest(StrictModel):
    outcome: Annotated[float, Field(strict=True, ge=-1, le=1, allow_inf_nan=False)] | None = Field(
        None, description="how the attempt went, from -1 to 1; without one nothing is learned from the end"
    )
    reason: Literal["completed", "failed", "max_turns", "max_tokens", "deadline", "abandoned", "infrastructure"] = (
        Field(
            "completed",
            description="`failed`: the agent gave up, or its program raised an error; `max_turns`, `max_tokens`, "
            "`deadline`: it reached a limit; `abandoned`: nobody can tell how it went; `infrastructure`: an engine, a "
            "sandbox, the environment or the host of a tool was down. The last two have no outcome",
        )
    )

    @model_validator(mode="after")
    def check_outcome(self) -> Self:
        if self.reason in LOST_REASONS and self.outcome is not None:
            raise ValueError(f"outcome: an episode that ends as {self.reason} has none; end it as completed or failed")
        return self


class EpisodeView(BaseModel):
    object: Literal["episode"] = "episode"
    id: str
    policy: str
    task: str | None
    group: EpisodeGroup | None
    trace_id: str | None
    metadata: dict[str, str]
    state: Literal["open", "ended"]
    end_reason: str | None = Field(
        description="completed, failed, abandoned or infrastructure, as reported; idle_timeout, deadline, max_turns or "
        "max_tokens"
    )
    reported_reason: str | None = Field(
        description="what its end was reported as, also where a limit had ended it before; null: not reported"
    )
    outcome: float | None
    start_version: str | None = Field(description="the version of its first chat; later ones may have newer versions")
    num_turns: int = Field(description="its chat requests")
    num_tokens: int = Field(description="output tokens of all of them")
    limits: EpisodeLimits
    sampling: Literal["request", "policy"]
    service_tier: Literal["auto", "default", "flex"]
    version: Literal["follow", "leash", "pin"]
    created_at: float
    deadline_at: float
    ended_at: float | None


class EpisodeGraphView(EpisodeView):
    turns: list[GraphTurn] = Field(description="its first 1,000 turns, and what each of them continues")
    has_more_turns: bool


class NewEpisodeView(EpisodeView):
    api_key: str = Field(description="for the chats, the feedback and the end of this episode alone")
    base_url: str = Field(description="with the key, all that a client of OpenAI's API needs")


class DeletedEpisode(BaseModel):
    object: Literal["episode.deleted"] = "episode.deleted"
    id: str
    deleted: Literal[True] = True


class EpisodeList(Page[EpisodeView]):
    pass
