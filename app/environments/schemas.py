"""Requests and views of planned runs and their attempts."""

from typing import Annotated, Literal

from pydantic import BaseModel, Field, StrictInt, StringConstraints

from app.chat.schemas import MetadataKey, MetadataValue
from app.core.http import StrictModel
from app.core.pagination import Page
from app.episodes.schemas import Count, EndRequest, EpisodeView, PolicyName, Task
from app.training.episode_groups import MAX_SIZE

DAY = 86_400.0
MAX_TASKS = 10_000_000
MAX_LEASES = 1000  # that one request renews
MAX_PAIRS = 4  # of a plan's own metadata: an episode has 16, of which 8 describe the attempt and 3 name the run
MAX_DESCRIPTION = 8
SAFE_INTEGER = 2**53 - 1
RunName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,62}$")]
Digest = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
AttemptId = Annotated[str, StringConstraints(min_length=1, max_length=48)]
Fence = Annotated[StrictInt, Field(ge=1, le=SAFE_INTEGER, description="the fencing token of the claim")]
Index = Annotated[StrictInt, Field(ge=0, le=MAX_TASKS)]


class RunLimits(StrictModel):
    """What ends an attempt, as the environment holds it. The service holds all but `max_reply_tokens`, too."""

    max_turns: Count | None = None
    max_tokens: Count | None = None
    max_reply_tokens: Count | None = None
    deadline_seconds: float = Field(3600.0, gt=0, le=DAY)


class Plan(StrictModel):
    """What a run plays. All processes that play it send the same plan."""

    policy: PolicyName
    group_size: int = Field(1, ge=1, le=MAX_SIZE, strict=True, description="attempts at each task, which are compared")
    split: Annotated[str, StringConstraints(max_length=512)] = Field("train", description="of the tasks")
    seed: StrictInt = Field(0, ge=-SAFE_INTEGER, le=SAFE_INTEGER, description="of the tasks and the attempts")
    version: Literal["follow", "leash", "pin"] = Field("follow", description="as that of an episode")
    limits: RunLimits = RunLimits()
    metadata: dict[MetadataKey, MetadataValue] = Field(
        default_factory=dict, max_length=MAX_PAIRS, description="of each episode, such as the environment's name"
    )
    description_sha256: Digest | None = Field(
        None, description="of what the environment says of its first attempt; null is not compared"
    )


class RunRequest(Plan):
    name: RunName = Field(description="all processes that send the same name and plan play one run")
    num_tasks: StrictInt = Field(ge=1, le=MAX_TASKS, description="a run that exists may get more, but not fewer")

    def plan(self) -> Plan:
        return Plan.model_validate(self.model_dump(exclude={"name", "num_tasks"}))


class ClaimRequest(StrictModel):
    owner: Annotated[str, StringConstraints(min_length=1, max_length=128)] = Field(
        description="a random name of who plays one attempt at a time: a claim that is sent again returns the attempt "
        "that the owner holds"
    )
    num_tasks: Index | None = Field(None, description="how many tasks the environment has, if they are fewer")


class Lease(StrictModel):
    id: AttemptId
    fence: Fence


class RenewRequest(StrictModel):
    leases: list[Lease] = Field(max_length=MAX_LEASES)


class StartRequest(StrictModel):
    fence: Fence
    task: Task = Field(description="the name of the task, the same in every process")
    description: dict[MetadataKey, MetadataValue] = Field(
        default_factory=dict, max_length=MAX_DESCRIPTION, description="further metadata of the episode"
    )


class FinishRequest(EndRequest):
    fence: Fence

    def report(self) -> EndRequest:
        """Return the report of the episode's end."""
        return EndRequest(outcome=self.outcome, reason=self.reason)


class ReleaseRequest(StrictModel):
    fence: Fence


class AttemptCounts(BaseModel):
    """Planned attempts by state. Those of `waiting` and `under_way` are still to be played, or played now."""

    waiting: int
    under_way: int
    done: int
    lost: int = Field(description="every try was lost")
    cancelled: int = Field(
        description="not played: the run was cancelled, their group would be too old to be learned from, or the "
        "environment has no such task"
    )


class RunView(BaseModel):
    object: Literal["planned_run"] = "planned_run"
    name: str
    policy: str
    num_tasks: int
    group_size: int
    split: str
    seed: int
    version: Literal["follow", "leash", "pin"]
    limits: RunLimits
    metadata: dict[str, str]
    attempts: AttemptCounts
    ends: dict[str, int] = Field(description="attempts that are done, by the `end_reason` of their episodes")
    mean_outcome: float | None = Field(description="of the attempts that are done and have an outcome")
    is_complete: bool = Field(description="no attempt is left to be played")
    lease_seconds: float = Field(description="an attempt that nobody renews for so long is played again")
    created_at: float
    cancelled_at: float | None


class RunList(Page[RunView]):
    pass


class AttemptView(BaseModel):
    object: Literal["run_attempt"] = "run_attempt"
    id: str
    task_index: int
    attempt_index: int
    state: Literal["open", "done", "lost", "cancelled"]
    reason: str | None = Field(description="why it is lost or cancelled")
    is_under_way: bool = Field(description="open, and a process holds its lease")
    fence: int
    num_failed: int = Field(description="tries that were reported as lost")
    num_expired: int = Field(description="tries whose process died")
    episode: EpisodeView | None = Field(description="of the latest try; null before it begins")


class AttemptList(Page[AttemptView]):
    pass


class ClaimView(BaseModel):
    object: Literal["run_claim"] = "run_claim"
    attempt: AttemptView | None = Field(description="null: none is left, or others play all that are")
    is_complete: bool
    lease_seconds: float


class RenewalView(BaseModel):
    object: Literal["run_renewal"] = "run_renewal"
    lost: list[str] = Field(description="attempts that the caller does not hold any more")
