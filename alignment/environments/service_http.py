"""HTTP to Attune's own service: one client that is held open, and patience with a service that is busy or restarts."""

import asyncio
import time
from collections.abc import Mapping
from ssl import SSLContext
from typing import NamedTuple, Protocol

import httpx2
import orjson
from pydantic import BaseModel, ConfigDict, ValidationError

from alignment.environments.errors import InfrastructureFailure, ServiceRefusal
from alignment.environments.http_client import CONNECT_SECONDS, default_ssl_context

PATIENCE_SECONDS = 30.0
FIRST_WAIT_SECONDS = 0.25
RETRY_HEADER = "x-stainless-retry-count"  # of the OpenAI clients
LONGEST_WAIT_SECONDS = 5.0
BUSY_STATUSES = frozenset({429, 502, 503, 504})


class ErrorDetail(BaseModel):
    model_config = ConfigDict(coerce_numbers_to_str=True)  # other services have a status for a code

    message: str
    code: str | None = None


class ErrorBody(BaseModel):
    error: ErrorDetail


class ServiceAnswer(NamedTuple):
    """A successful answer. `is_created`: its status is 201."""

    content: bytes
    is_created: bool


class ServiceTransport(Protocol):
    """How requests reach the service: ServiceHttp, or a stand-in that answers without a service, as in benchmarks."""

    async def request(
        self,
        method: str,
        url: str,
        key: str,
        body: object = None,
        headers: Mapping[str, str] | None = None,
        seconds: float = 60.0,
    ) -> ServiceAnswer:
        """Return the answer. Raises ServiceRefusal for 4xx, and InfrastructureFailure if the service does not serve.

        `seconds` is for one try.
        """
        ...

    async def close(self) -> None: ...


class ServiceHttp(ServiceTransport):
    """Requests to the service. A busy service, and one that is not reached, is asked again for `patience` seconds.

    So every request must be safe to repeat.
    """

    def __init__(
        self, *, connections: int = 100, patience: float = PATIENCE_SECONDS, verify: SSLContext | None = None
    ) -> None:
        self._patience = patience
        self._verify = verify or default_ssl_context()
        self._client = httpx2.AsyncClient(
            timeout=httpx2.Timeout(None, connect=CONNECT_SECONDS),
            limits=httpx2.Limits(max_connections=connections, max_keepalive_connections=connections),
            verify=self._verify,
            follow_redirects=False,
            trust_env=False,
        )

    def copy(self, *, patience: float) -> "ServiceHttp":
        """Return another client with one connection, such as for another event loop, that trusts the same hosts."""
        return ServiceHttp(connections=1, patience=patience, verify=self._verify)

    async def request(
        self,
        method: str,
        url: str,
        key: str,
        body: object = None,
        headers: Mapping[str, str] | None = None,
        seconds: float = 60.0,
    ) -> ServiceAnswer:
        content = None if body is None else orjson.dumps(body)
        sent = {"authorization": f"Bearer {key}", "content-type": "application/json", **(headers or {})}
        gives_up_at = time.monotonic() + self._patience
        wait, num_retries = FIRST_WAIT_SECONDS, 0
        while True:
            retry_after: float | None = None
            cause: Exception | None = None
            try:
                async with asyncio.timeout(seconds):
                    response = await self._client.request(method, url, content=content, headers=sent)
            except (httpx2.NetworkError, httpx2.RemoteProtocolError, httpx2.ConnectTimeout) as error:
                cause, problem = error, f"the service is not reached ({type(error).__name__})"
            except TimeoutError as error:
                raise InfrastructureFailure(f"the service does not answer within {seconds:g} s") from error
            else:
                if response.is_success:
                    return ServiceAnswer(response.content, response.status_code == 201)
                if response.status_code not in BUSY_STATUSES:
                    raise _refusal(response)
                problem = f"the service is busy: {_message(response)}"
                retry_after = _retry_after(response)
            wait_now = wait if retry_after is None else retry_after
            if time.monotonic() + wait_now > gives_up_at:
                raise InfrastructureFailure(problem) from cause
            await asyncio.sleep(wait_now)
            wait, num_retries = min(2 * wait, LONGEST_WAIT_SECONDS), num_retries + 1
            sent[RETRY_HEADER] = str(num_retries)  # so that a first reply that was lost on the way is not learned from

    async def close(self) -> None:
        await self._client.aclose()


def _refusal(response: httpx2.Response) -> Exception:
    if response.status_code >= 500 or response.status_code < 400:
        return InfrastructureFailure(f"the service answered with status {response.status_code}: {_message(response)}")
    try:
        code = ErrorBody.model_validate_json(response.content).error.code
    except ValidationError:
        code = None
    return ServiceRefusal(response.status_code, code, _message(response))


def _message(response: httpx2.Response) -> str:
    try:
        return ErrorBody.model_validate_json(response.content).error.message
    except ValidationError:  # of a proxy, or of another service
        return f"status {response.status_code}, not as Attune answers"


def _retry_after(response: httpx2.Response) -> float | None:
    text = response.headers.get("retry-after", "")
    return float(text) if text.isdecimal() else None
