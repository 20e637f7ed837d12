"""The clients: Attune, and AsyncAttune for asyncio."""

from dataclasses import replace
from pathlib import Path
from typing import Self, Unpack

import httpx

from attune_client.chat import AsyncChat, Chat
from attune_client.episodes import AsyncEpisode, Episode, EpisodeFields
from attune_client.feedback import AsyncFeedback, Feedback
from attune_client.policies import AsyncPolicies, Policies
from attune_client.queue import MAX_QUEUED_ITEMS, FeedbackQueue
from attune_client.transport import ApiKey, AsyncTransport, Connection, RetryPolicy, SyncTransport

TIMEOUT_SECONDS = 60.0
MAX_RETRIES = 4
QUEUE_TIMEOUT_SECONDS = 30.0


class Attune:
    """A client of one Attune service. It may be shared by threads.

    Args:
        base_url: The address of the service; by default ATTUNE_URL, or http://127.0.0.1:8700.
        api_key: The API key, or a function that returns it; by default ATTUNE_API_KEY.
        timeout: Seconds for connecting, and for each wait for data.
        max_retries: How often a request is sent again after a failed connection, 408, 429 or 5xx.
        http_client: An httpx.Client of your own, for example with a proxy. You close it.
    """

    def __init__(
        self,
        base_url: str | None = None,
        api_key: ApiKey | None = None,
        *,
        timeout: float = TIMEOUT_SECONDS,
        max_retries: int = MAX_RETRIES,
        http_client: httpx.Client | None = None,
    ) -> None:
        self._connection = Connection.create(base_url, api_key, timeout, max_retries)
        self._owns_http = http_client is None
        self._http = http_client or httpx.Client()
        transport = SyncTransport(self._connection, self._http)
        self.chat = Chat(transport)
        self.feedback = Feedback(transport)
        self.policies = Policies(transport.json)
        self._transport = transport

    def episode(
        self,
        policy: str,
        *,
        failure_outcome: float | None = None,
        queue: FeedbackQueue | None = None,
        **fields: Unpack[EpisodeFields],
    ) -> Episode:
        """Return an episode of this policy, which `with` creates and ends; Episode explains the arguments."""
        return Episode(self._transport, policy, failure_outcome, queue, **fields)

    def queue(self, path: str | Path, *, max_items: int = MAX_QUEUED_ITEMS, background: bool = True) -> FeedbackQueue:
        """Return an offline queue in this file; FeedbackQueue explains the arguments.

        The queue retries by itself, so its requests are sent without retries. They time out after 30 seconds at most,
        because closing the queue waits for a request that is running.
        """
        timeout = min(self._connection.timeout, QUEUE_TIMEOUT_SECONDS)
        connection = replace(self._connection, timeout=timeout, retries=RetryPolicy(max_retries=0))
        feedback = Feedback(SyncTransport(connection, self._http))
        return FeedbackQueue(path, feedback, max_items=max_items, background=background)

    def close(self) -> None:
        """Close the connections. Close queues first."""
        if self._owns_http:
            self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class AsyncAttune:
    """A client of one Attune service for asyncio; its arguments are those of Attune."""

    def __init__(
        self,
        base_url: str | None = None,
        api_key: ApiKey | None = None,
        *,
        timeout: float = TIMEOUT_SECONDS,
        max_retries: int = MAX_RETRIES,
        http_client: httpx.AsyncClient | None = None,
    ) -> None:
        self._connection = Connection.create(base_url, api_key, timeout, max_retries)
        self._owns_http = http_client is None
        self._http = http_client or httpx.AsyncClient()
        transport = AsyncTransport(self._connection, self._http)
        self.chat = AsyncChat(transport)
        self.feedback = AsyncFeedback(transport)
        self.policies = AsyncPolicies(transport.json)
        self._transport = transport

    def episode(
        self,
        policy: str,
        *,
        failure_outcome: float | None = None,
        queue: FeedbackQueue | None = None,
        **fields: Unpack[EpisodeFields],
    ) -> AsyncEpisode:
        """Return an episode of this policy, which `async with` creates and ends; Episode explains the arguments."""
        return AsyncEpisode(self._transport, policy, failure_outcome, queue, **fields)

    async def close(self) -> None:
        """Close the connections."""
        if self._owns_http:
            await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()
