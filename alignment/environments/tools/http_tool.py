"""Tools behind HTTP: a POST of the arguments as JSON; the answer's body is the result."""

from collections.abc import Mapping

import httpx2
from pydantic import BaseModel, ValidationError

from alignment.environments.errors import InfrastructureFailure, ToolError
from alignment.environments.http_client import ANSWER_SECONDS, open_client, post_json
from alignment.environments.tools.base import EpisodeContext, JsonObject, Tool, ToolResult

EPISODE_HEADER = "x-attune-episode"
# What a service says of arguments that it does not accept.
REFUSAL_STATUSES = frozenset({400, 409, 422})


class RewardAnswer(BaseModel):
    reward: float


class HttpTool(Tool[httpx2.AsyncClient]):
    """A service that takes arguments by POST and answers with text or JSON.

    2xx is a result. A status of `refusal_statuses` is the model's mistake, and the model sees the body. Everything
    else, such as 401, 404, 500, a redirect, no connection or no answer within `seconds`, is a failure of the host.

    The header `x-attune-episode` names the episode; cookies last as long as the episode. `headers` may hold keys. At
    the end of the episode `reward_url`, if there is one, is sent `{}` and answers with `{"reward": number}`.
    """

    has_own_time_limit = True

    def __init__(
        self,
        name: str,
        description: str,
        parameters: JsonObject,
        url: str,
        *,
        headers: Mapping[str, str] | None = None,
        refusal_statuses: frozenset[int] = REFUSAL_STATUSES,
        reward_url: str | None = None,
        seconds: float = ANSWER_SECONDS,
    ) -> None:
        self.name = name
        self.description = description
        self.parameters = parameters
        self._url = url
        self._headers = dict(headers or {})
        self._refusals = refusal_statuses
        self._reward_url = reward_url
        self._seconds = seconds
        self._noun = f"the service of the tool {name!r}"

    async def create(self, episode: EpisodeContext) -> httpx2.AsyncClient:
        return open_client({**self._headers, EPISODE_HEADER: episode.id})

    async def execute(self, state: httpx2.AsyncClient, arguments: JsonObject) -> ToolResult:
        answer = await post_json(state, self._url, arguments, noun=self._noun, seconds=self._seconds)
        if answer.status in self._refusals:
            raise ToolError(answer.text or f"the tool answered {answer.status}")
        if not answer.is_success:
            raise InfrastructureFailure(f"{self._noun} answered {answer.status}")
        return ToolResult(answer.text)

    async def reward(self, state: httpx2.AsyncClient) -> float:
        if self._reward_url is None:
            return 0.0
        answer = await post_json(state, self._reward_url, {}, noun=self._noun, seconds=self._seconds)
        try:
            return RewardAnswer.model_validate_json(answer.text if answer.is_success else "").reward
        except ValidationError as error:
            raise InfrastructureFailure(f"{self._noun} gave no reward, but status {answer.status}") from error

    async def release(self, state: httpx2.AsyncClient) -> None:
        await state.aclose()
