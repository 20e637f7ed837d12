"""Attune's API as a run of an environment needs it: read an episode, report the rewards of its steps."""

from collections.abc import Mapping, Sequence
from urllib.parse import quote

from pydantic import BaseModel

from alignment.environments.attempts import ChatEndpoint
from alignment.environments.protocols import StepReward
from alignment.environments.service_http import ErrorDetail, ServiceAnswer, ServiceHttp

EPISODES = "/v1/episodes"
REQUEST_SECONDS = 60.0
BATCH_SIZE = 1000  # the service takes no more
STEP_NAME = "step"
OTHER_EPISODE = "episode_key"  # what the key of an episode may not reward
STEP_SOURCE = {"kind": "CODE", "id": "environment"}


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


class ServiceClient:
    """The service at `url`, as the holder of this API key. Its errors are those of ServiceHttp.

    `seconds`: how long one try of a request may take.
    """

    def __init__(self, url: str, api_key: str, http: ServiceHttp, seconds: float = REQUEST_SECONDS) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self._api_key = api_key
        self._http = http
        self._seconds = seconds

    def base_url(self, episode_id: str) -> str:
        """Return the base URL of an episode for clients of OpenAI's API."""
        return f"{self.url}{EPISODES}/{quote(episode_id, safe='')}"

    def chat_endpoint(self) -> ChatEndpoint:
        """Return where chats are sent that are no part of an episode."""
        return ChatEndpoint(f"{self.url}/v1", self._api_key, self._http)

    def copy(self, *, patience: float) -> "ServiceClient":
        """Return a client of the same service with an HTTP client of its own, which gives up after `patience` seconds,
        or twice as much."""
        return ServiceClient(self.url, self._api_key, self._http.copy(patience=patience), seconds=patience)

    async def close(self) -> None:
        await self._http.close()

    async def request(self, method: str, path: str, body: Mapping[str, object] | None = None) -> ServiceAnswer:
        """Send a request with the API key."""
        return await self._http.request(method, self.url + path, self._api_key, body, seconds=self._seconds)

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


def _feedback(step: StepReward) -> dict[str, object]:
    return {
        "kind": "score",
        "id": f"{step.completion_id}/{STEP_NAME}",  # sent again, it is the same feedback
        "name": STEP_NAME,
        "value": step.reward,
        "source": STEP_SOURCE,
        "completion_id": step.completion_id,
    }
