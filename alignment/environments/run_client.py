"""A planned run of the service as one of its processes needs it: join it, claim attempts, report how they went.

Every request may be sent again: the service recognizes it.
"""

from collections.abc import Mapping
from dataclasses import asdict
from hashlib import sha256
from json import dumps as dump_json
from urllib.parse import quote

from pydantic import BaseModel

from alignment.environments.protocols import Outcome
from alignment.environments.run_plan import PlannedAttempt, RunPlan
from alignment.environments.service_client import CreatedEpisode, EpisodeRecord, ServiceClient

RUNS = "/v1/environments/runs"
LEASE_LOST = "lease_lost"  # the code of a refusal: the attempt is another process's now


class AttemptCounts(BaseModel):
    """Planned attempts of a run by state, those of all processes together."""

    waiting: int
    under_way: int
    done: int
    lost: int
    cancelled: int


class RunRecord(BaseModel):
    """A run as the service describes it."""

    attempts: AttemptCounts
    mean_outcome: float | None
    is_complete: bool
    lease_seconds: float


class AttemptRecord(BaseModel):
    id: str
    task_index: int
    attempt_index: int
    state: str
    fence: int
    episode: EpisodeRecord | None


class Claim(BaseModel):
    attempt: AttemptRecord | None
    is_complete: bool


class Renewal(BaseModel):
    lost: list[str]


def digest_description(description: Mapping[str, str]) -> str:
    """Return a digest of what an environment says of an attempt: processes of one run must have the same."""
    return sha256(dump_json(dict(description), sort_keys=True).encode()).hexdigest()


class RunClient:
    """The run of this name. Errors are those of ServiceHttp."""

    def __init__(self, service: ServiceClient, name: str) -> None:
        self._service = service
        self._name = name
        self._path = f"{RUNS}/{quote(name, safe='')}"

    async def join(self, plan: RunPlan, description_sha256: str | None) -> RunRecord:
        """Create the run, or join it. Raises ServiceRefusal if it was begun with another plan."""
        body = {
            "name": self._name,
            "policy": plan.policy,
            "num_tasks": plan.num_tasks,
            "group_size": plan.group_size,
            "split": plan.split,
            "seed": plan.seed,
            "version": plan.version,
            "limits": asdict(plan.limits),
            "metadata": plan.metadata,
            "description_sha256": description_sha256,
        }
        answer = await self._service.request("POST", RUNS, body)
        return RunRecord.model_validate_json(answer.content)

    async def read(self) -> RunRecord:
        answer = await self._service.request("GET", self._path)
        return RunRecord.model_validate_json(answer.content)

    async def claim(self, owner: str, num_tasks: int | None) -> Claim:
        """Claim the next attempt. `num_tasks`: how many the environment has, if it is known to have fewer."""
        body = {"owner": owner, "num_tasks": num_tasks}
        answer = await self._service.request("POST", f"{self._path}/claim", body)
        return Claim.model_validate_json(answer.content)

    async def renew(self, fences: Mapping[str, int]) -> list[str]:
        """Renew the leases of these attempts, by id. Return those that are lost."""
        body = {"leases": [{"id": id, "fence": fence} for id, fence in fences.items()]}
        answer = await self._service.request("POST", f"{self._path}/renew", body)
        return Renewal.model_validate_json(answer.content).lost

    async def start(self, attempt: PlannedAttempt, description: Mapping[str, str]) -> CreatedEpisode:
        """Create the episode of an attempt."""
        body = {"task": attempt.task.id, "description": dict(description)}
        return CreatedEpisode.model_validate_json(await self._act(attempt.id, attempt.fence, "start", body))

    async def finish(self, attempt: PlannedAttempt, outcome: Outcome) -> EpisodeRecord | None:
        """Report how an attempt went. Return its episode, or None if it has none."""
        body = {"outcome": outcome.reward, "reason": outcome.reason}
        content = await self._act(attempt.id, attempt.fence, "finish", body)
        return AttemptRecord.model_validate_json(content).episode

    async def release(self, id: str, fence: int) -> None:
        """Give an attempt back, to be played again."""
        await self._act(id, fence, "release", {})

    async def _act(self, id: str, fence: int, verb: str, body: Mapping[str, object]) -> bytes:
        path = f"{self._path}/attempts/{quote(id, safe='')}/{verb}"
        return (await self._service.request("POST", path, {"fence": fence, **body})).content
