"""Attune's API as a run of an environment needs it: create an episode, report its rewards and its end."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from urllib.parse import quote

from pydantic import BaseModel

from alignment.environments.attempts import ChatEndpoint
from alignment.environments.protocols import Limits, Outcome, Reason, StepReward
from alignment.environments.service_http import ErrorDetail, ServiceHttp

EPISODES = "/v1/episodes"
BATCH_SIZE = 1000  # the service takes no more
STEP_NAME = "step"
OTHER_EPISODE = "episode_key"  # what the key of an episode may not reward
STEP_SOURCE = {"kind": "CODE", "id": "environment"}
# The service ends an episode this much later than the loop, which then grades what there is.
DEADLINE_MARGIN_SECONDS = 5.0


class EpisodeRecord(BaseModel):
    """An episode as the service describes it."""

    id: str
    state: str
    end_reason: str | None
    reported_reason: str | None
    outcome: float | None
    num_turns: int
    num_tokens: int


class ItemAnswer(BaseModel):
    error: ErrorDetail | None = None


class BatchAnswer(BaseModel):
    data: list[ItemAnswer]


class CreatedEpisode(EpisodeRecord):
    api_key: str
    is_replay: bool = False

    @property
    def is_open(self) -> bool:
        return self.state == "open"


@dataclass(frozen=True)
class NewEpisode:
    """What an episode is created with. `group`: the name and the size of the group, if it belongs to one."""

    policy: str
    task: str
    limits: Limits
    version: str = "follow"
    group: tuple[str, int] | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)

    def body(self) -> dict[str, object]:
        limits: dict[str, object] = {
            "deadline_seconds": self.limits.deadline_seconds + DEADLINE_MARGIN_SECONDS,
            # The environment's own time between two chats is none of the agent's doing.
            "idle_seconds": self.limits.deadline_seconds + DEADLINE_MARGIN_SECONDS,
            "max_turns": self.limits.max_turns,
            "max_tokens": self.limits.max_tokens,
        }
        body: dict[str, object] = {
            "policy": self.policy,
            "task": self.task,
            "sampling": "policy",  # agents that send temperature 0 would leave nothing to learn from
            "service_tier": "flex",  # chats of people come first
            "version": self.version,
            "limits": {name: value for name, value in limits.items() if value is not None},
            "metadata": dict(self.metadata),
        }
        if self.group is not None:
            id, size = self.group
            body["group"] = {"id": id, "size": size}
        return body


class ServiceClient:
    """The service at `url`, as the holder of this API key. Its errors are those of ServiceHttp."""

    def __init__(self, url: str, api_key: str, http: ServiceHttp) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self._api_key = api_key
        self._http = http

    def base_url(self, episode_id: str) -> str:
        """Return the base URL of an episode for clients of OpenAI's API."""
        return f"{self.url}{EPISODES}/{quote(episode_id, safe='')}"

    def chat_endpoint(self) -> ChatEndpoint:
        """Return where chats are sent that are no part of an episode."""
        return ChatEndpoint(f"{self.url}/v1", self._api_key, self._http)

    async def create(self, episode: NewEpisode, idempotency_key: str) -> CreatedEpisode:
        """Create an episode, or return the one that the same request has created before."""
        headers = {"idempotency-key": idempotency_key}
        answer = await self._http.request("POST", self.url + EPISODES, self._api_key, episode.body(), headers)
        created = CreatedEpisode.model_validate_json(answer.content)
        return created.model_copy(update={"is_replay": not answer.is_created})

    async def read(self, episode_id: str) -> EpisodeRecord:
        answer = await self._http.request("GET", self.base_url(episode_id), self._api_key)
        return EpisodeRecord.model_validate_json(answer.content)

    async def reward_steps(self, rewards: Sequence[StepReward], episode_key: str) -> str | None:
        """Send the rewards of an episode's replies as feedback on them. Return why one is refused, or None.

        The episode's own key refuses those of other replies, which an environment could name, too.
        """
        for first in range(0, len(rewards), BATCH_SIZE):
            body = {"items": [_feedback(step) for step in rewards[first : first + BATCH_SIZE]]}
            answer = await self._http.request("POST", f"{self.url}/v1/feedback/batch", episode_key, body)
            for result in BatchAnswer.model_validate_json(answer.content).data:
                if result.error is not None and result.error.code == OTHER_EPISODE:
                    return "a reward names a reply that is none of its episode"
                if result.error is not None:
                    return f"the reward of a reply is refused: {result.error.message}"
        return None

    async def end(self, episode_id: str, outcome: Outcome) -> EpisodeRecord:
        """Report how an attempt went. The same report again changes nothing."""
        reason: Reason = outcome.reason
        body = {"outcome": outcome.reward, "reason": reason}
        answer = await self._http.request("POST", f"{self.base_url(episode_id)}/end", self._api_key, body)
        return EpisodeRecord.model_validate_json(answer.content)


def _feedback(step: StepReward) -> dict[str, object]:
    return {
        "kind": "score",
        "id": f"{step.completion_id}/{STEP_NAME}",  # sent again, it is the same feedback
        "name": STEP_NAME,
        "value": step.reward,
        "source": STEP_SOURCE,
        "completion_id": step.completion_id,
    }
