"""Send requests with retries: exponential backoff with jitter, at least as long as Retry-After."""

import asyncio
import itertools
import os
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import httpx

from attune_client.errors import AttuneError, connection_error, response_error

DEFAULT_URL = "http://127.0.0.1:8700"
NO_KEY = "Attune needs an API key: pass api_key, or set ATTUNE_API_KEY."
ApiKey = str | Callable[[], str]


def _user_agent() -> str:
    try:
        return f"attune-client/{version('attune-client')}"
    except PackageNotFoundError:  # run from a source tree
        return "attune-client"


@dataclass(frozen=True)
class Request:
    """A request to the API. `is_stream` leaves the body of a successful response unread."""

    method: str
    path: str
    body: Any = None
    params: Mapping[str, Any] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    is_stream: bool = False


@dataclass(frozen=True)
class RetryPolicy:
    """When a request is sent again, and after how many seconds."""

    max_retries: int = 4
    base_seconds: float = 0.5
    max_seconds: float = 8.0
    max_retry_after: float = 120.0  # a longer Retry-After is not waited for: the error is raised

    def delay(self, num_retries: int, error: AttuneError) -> float | None:
        """Return the seconds until the next try, or None if there is none."""
        if not error.should_retry or num_retries >= self.max_retries:
            return None
        if error.retry_after is not None and error.retry_after > self.max_retry_after:
            return None
        return max(error.retry_after or 0.0, self.backoff(num_retries))

    def backoff(self, num_retries: int) -> float:
        """Return a random time between half and the whole of the backoff, so that clients do not retry together."""
        seconds = min(self.max_seconds, self.base_seconds * 2.0 ** min(num_retries, 30))
        return seconds * random.uniform(0.5, 1.0)


@dataclass(frozen=True)
class Connection:
    """The address and the key of a service, and how requests to it are retried."""

    base_url: str
    api_key: ApiKey = field(repr=False)
    timeout: float
    retries: RetryPolicy

    @classmethod
    def create(cls, base_url: str | None, api_key: ApiKey | None, timeout: float, max_retries: int) -> "Connection":
        """Fill in ATTUNE_URL and ATTUNE_API_KEY. Raises ValueError without a key."""
        url = (base_url or os.environ.get("ATTUNE_URL") or DEFAULT_URL).rstrip("/").removesuffix("/v1")
        key = api_key or os.environ.get("ATTUNE_API_KEY")
        if not key:
            raise ValueError(NO_KEY)
        return cls(url, key, timeout, RetryPolicy(max_retries))

    def arguments(self, request: Request, num_retries: int) -> dict[str, Any]:
        """Return the arguments of httpx's `build_request`.

        The server learns the number of retries from the header that OpenAI's clients send: of a chat that is sent
        again, it trains on one reply only.
        """
        key = self.api_key if isinstance(self.api_key, str) else self.api_key()
        headers = {"authorization": f"Bearer {key}", "user-agent": _user_agent(), **request.headers}
        if num_retries:
            headers["x-stainless-retry-count"] = str(num_retries)
        return {
            "method": request.method,
            "url": self.base_url + request.path,
            "json": request.body,
            "params": {name: value for name, value in request.params.items() if value is not None},
            "headers": headers,
            "timeout": self.timeout,
        }


class SyncTransport:
    """Sends requests and retries them."""

    def __init__(self, connection: Connection, http: httpx.Client) -> None:
        self.connection = connection
        self.http = http

    def send(self, request: Request) -> httpx.Response:
        """Return a successful response. Raises AttuneError after the last try."""
        for num_retries in itertools.count():
            try:
                built = self.http.build_request(**self.connection.arguments(request, num_retries))
                response = self.http.send(built, stream=request.is_stream)
                if response.is_success:
                    return response
                response.read()
                response.close()
                error: AttuneError = response_error(response)
            except httpx.TransportError as failure:
                error = connection_error(failure)
                error.__cause__ = failure
            seconds = self.connection.retries.delay(num_retries, error)
            if seconds is None:
                raise error
            time.sleep(seconds)
        raise AssertionError("unreachable")

    def json(self, request: Request) -> Any:
        return self.send(request).json()


class AsyncTransport:
    """Sends requests and retries them; the asynchronous form of SyncTransport."""

    def __init__(self, connection: Connection, http: httpx.AsyncClient) -> None:
        self.connection = connection
        self.http = http

    async def send(self, request: Request) -> httpx.Response:
        """Return a successful response. Raises AttuneError after the last try."""
        for num_retries in itertools.count():
            try:
                built = self.http.build_request(**self.connection.arguments(request, num_retries))
                response = await self.http.send(built, stream=request.is_stream)
                if response.is_success:
                    return response
                await response.aread()
                await response.aclose()
                error: AttuneError = response_error(response)
            except httpx.TransportError as failure:
                error = connection_error(failure)
                error.__cause__ = failure
            seconds = self.connection.retries.delay(num_retries, error)
            if seconds is None:
                raise error
            await asyncio.sleep(seconds)
        raise AssertionError("unreachable")

    async def json(self, request: Request) -> Any:
        return (await self.send(request)).json()
