"""Episodes: one attempt of an agent at one task, whose chats are recorded and learned from together.

with client.episode("assistant", task="refund", sampling="policy") as episode:
    subprocess.run(["my-agent"], env=os.environ | episode.environment())
    episode.end(1.0 if solved() else -1.0)
"""

import asyncio
import logging
import uuid
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Literal, Self, TypedDict, Unpack
from urllib.parse import quote

from attune_client.episode_ends import Reason, has_ended, is_infrastructure
from attune_client.errors import AttuneError, ConnectionFailed, ServerError, TimedOut
from attune_client.feedback import FeedbackKinds
from attune_client.transport import AsyncTransport, Request, SyncTransport
from attune_client.types import FeedbackBody

log = logging.getLogger("attune_client")
PATH = "/v1/episodes"
NOT_STARTED = "the episode is not created yet: use `with client.episode(…) as episode`, or call start()"
UNREACHABLE = (ConnectionFailed, TimedOut, ServerError)


class EpisodeFields(TypedDict, total=False):
    """What an episode may be created with; see docs/episodes.md.

    `sampling="policy"`: replies are sampled so that they can be learned from, whatever the agent asks for. `group`:
    {"id": "…", "size": 8}, attempts at the same task. `trace_id`: chats of this trace belong to the episode. `version`:
    "leash" and "pin" keep it on the version of its first chat. `service_tier`: "flex" puts its chats behind all others.
    """

    task: str
    metadata: Mapping[str, str]
    limits: Mapping[str, float]
    sampling: Literal["request", "policy"]
    service_tier: Literal["auto", "default", "flex"]
    version: Literal["follow", "leash", "pin"]
    group: Mapping[str, Any]
    trace_id: str


class OpenAIOptions(TypedDict):
    """The options of OpenAI's clients."""

    base_url: str
    api_key: str


class _Episode:
    """What both kinds of episodes share.

    Attributes:
        record: The episode as the service created it; without its key.
        is_ended: Whether its end has been reported, or queued.
    """

    def __init__(
        self,
        base_url: str,
        policy: str,
        fields: EpisodeFields,
        failure_outcome: float | None,
        queue: FeedbackKinds[str] | None,
    ) -> None:
        self._base_url = base_url
        self._body = {"policy": policy, **fields}
        self._idempotency_key = str(uuid.uuid4())  # made before the first try: a retry creates no other episode
        self._failure_outcome = failure_outcome
        self._queue = queue
        self._key: str | None = None
        self.policy = policy
        self.record: dict[str, Any] = {}
        self.is_ended = False

    @property
    def id(self) -> str:
        return str(self._created()["id"])

    @property
    def api_key(self) -> str:
        """The key of this episode alone: all chats with it belong to the episode."""
        self._created()
        assert self._key is not None
        return self._key

    @property
    def base_url(self) -> str:
        """The base URL for clients of OpenAI's API."""
        return f"{self._base_url}{PATH}/{self.id}"

    @property
    def target(self) -> dict[str, str]:
        """What feedback on the episode names, as in `client.feedback.score(episode.target, 0.5)`."""
        return {"episode_id": self.id}

    def openai(self) -> OpenAIOptions:
        """Return the options of OpenAI's clients, as in `OpenAI(**episode.openai())`."""
        return {"base_url": self.base_url, "api_key": self.api_key}

    def environment(self, *, anthropic: bool = False) -> dict[str, str]:
        """Return the environment variables of a subprocess that is the agent.

        With `anthropic` also those that Anthropic's clients read.
        """
        variables = {"OPENAI_BASE_URL": self.base_url, "OPENAI_API_KEY": self.api_key}
        if anthropic:
            variables |= {"ANTHROPIC_BASE_URL": self._base_url, "ANTHROPIC_API_KEY": self.api_key}
        return variables

    def headers(self, agent: str | None = None, state_key: str | None = None) -> dict[str, str]:
        """Return the headers by which a client with a key of its own chats in the episode, as this agent.

        `state_key` names the state of the environment that the chat is in.
        """
        named = {"x-attune-agent": agent, "x-attune-state-key": state_key}
        return {"x-attune-episode": self.id} | {name: value for name, value in named.items() if value is not None}

    def _created(self) -> dict[str, Any]:
        if not self.record:
            raise RuntimeError(NOT_STARTED)
        return self.record

    def _create_request(self) -> Request:
        return Request("POST", PATH, self._body, headers={"idempotency-key": self._idempotency_key})

    def _take(self, created: dict[str, Any]) -> None:
        self._key = created.pop("api_key")
        self.record = created

    def _end_request(self, outcome: float | None, reason: Reason) -> Request:
        return Request("POST", f"{PATH}/{quote(self.id, safe='')}/end", {"outcome": outcome, "reason": reason})

    def _outcome_feedback(self, outcome: float) -> FeedbackBody:
        """Return the outcome as feedback, which counts once a limit has ended the episode.

        If the report had arrived, it is replaced by this equal value.
        """
        source = {"kind": "CODE", "id": "episode"}
        return {"kind": "score", "value": outcome, "name": "outcome", "source": source, "target": self.target}

    def _end_of(self, error: BaseException) -> tuple[float | None, Reason] | None:
        """Return how an episode ends whose block this error leaves, or None if it has ended.

        Of itself an error says nothing of the agent, since the program around it may have raised it: without a
        `failure_outcome` nobody can tell how it went, and `failed` would be learned from.
        """
        if has_ended(error):
            return None
        if is_infrastructure(error):
            return None, "infrastructure"
        if not isinstance(error, Exception) or self._failure_outcome is None:
            return None, "abandoned"
        return self._failure_outcome, "failed"


class Episode(_Episode):
    """An episode. Leaving the `with` block ends it: completed, or by an error as docs/clients.md says.

    Args:
        transport: How requests are sent, as the client does.
        policy: The policy that its chats name as `model`.
        fields: See EpisodeFields.
        failure_outcome: The outcome of an episode that an error ends, which then has failed; by default none, and it
            is abandoned.
        queue: An offline queue. An outcome that cannot be reported is stored there as feedback on the episode.
    """

    def __init__(
        self,
        transport: SyncTransport,
        policy: str,
        failure_outcome: float | None,
        queue: FeedbackKinds[str] | None,
        **fields: Unpack[EpisodeFields],
    ) -> None:
        super().__init__(transport.connection.base_url, policy, fields, failure_outcome, queue)
        self._transport = transport

    def start(self) -> Self:
        """Create the episode. Creating it again changes nothing."""
        if not self.record:
            self._take(self._transport.json(self._create_request()))
        return self

    def end(self, outcome: float | None = None, reason: Reason = "completed") -> None:
        """Report how it went, from -1 to 1. The same report again changes nothing; raises Conflict for another one.

        With a queue, an outcome that the service cannot receive now is delivered later.
        """
        request = self._end_request(outcome, reason)
        try:
            self.record = self._transport.json(request)
        except UNREACHABLE:
            if self._queue is None or outcome is None:
                raise
            self._queue.submit(self._outcome_feedback(outcome))
        self.is_ended = True

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.is_ended:
            return
        if error is None:
            self.end()
            return
        end = self._end_of(error)
        if end is None:
            return
        try:
            self.end(*end)
        except AttuneError as failure:  # the agent's own error matters more
            log.warning("the end of the episode %s was not reported: %s", self.id, failure)


class AsyncEpisode(_Episode):
    """An episode; the asynchronous form of Episode."""

    def __init__(
        self,
        transport: AsyncTransport,
        policy: str,
        failure_outcome: float | None,
        queue: FeedbackKinds[str] | None,
        **fields: Unpack[EpisodeFields],
    ) -> None:
        super().__init__(transport.connection.base_url, policy, fields, failure_outcome, queue)
        self._transport = transport

    async def start(self) -> Self:
        """Create the episode. Creating it again changes nothing."""
        if not self.record:
            self._take(await self._transport.json(self._create_request()))
        return self

    async def end(self, outcome: float | None = None, reason: Reason = "completed") -> None:
        """Report how it went, from -1 to 1. The same report again changes nothing; raises Conflict for another one."""
        request = self._end_request(outcome, reason)
        try:
            self.record = await self._transport.json(request)
        except UNREACHABLE:
            if self._queue is None or outcome is None:
                raise
            await asyncio.to_thread(self._queue.submit, self._outcome_feedback(outcome))
        self.is_ended = True

    async def __aenter__(self) -> Self:
        return await self.start()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.is_ended:
            return
        if error is None:
            await self.end()
            return
        end = self._end_of(error)
        if end is None:
            return
        try:
            await self.end(*end)
        except AttuneError as failure:  # the agent's own error matters more
            log.warning("the end of the episode %s was not reported: %s", self.id, failure)
