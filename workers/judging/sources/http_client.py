"""HTTP to judges and services: one POST of JSON, limited in time and size, without redirects."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import httpx2
import orjson

from alignment.config.rewards import EndpointConfig
from app.core.settings import Settings
from workers.judging.sources.address_guard import GUARDED, GuardedTransport
from workers.queue.leased_job import AttemptFailed, JobFailed

MAX_RESPONSE_BYTES = 1 << 20


def open_client(settings: Settings) -> httpx2.AsyncClient:
    """Return a client without a time-out of its own: `time_limit` sets one around each question."""
    transport = GuardedTransport(settings.private_hosts)
    return httpx2.AsyncClient(transport=transport, trust_env=False, follow_redirects=False, timeout=None)


@asynccontextmanager
async def time_limit(seconds: float) -> AsyncIterator[None]:
    """Limit everything from the connection to the last byte, so that a slow endpoint cannot hold the worker.

    Raises AttemptFailed.
    """
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError as error:
        raise AttemptFailed(f"no answer within {seconds:g} s") from error


async def post_json(
    http: httpx2.AsyncClient, url: str, body: Mapping[str, Any], key: str | None, *, is_policy_owned: bool
) -> tuple[int, bytes]:
    """Return the status and the content. Raises AttemptFailed, and JobFailed for a body that is not JSON.

    `is_policy_owned`: the URL comes from a project, not from the deployment, and may lead to public addresses only.
    The reasons name neither the URL nor the key: they are stored where tenants can read them.
    """
    headers = {"content-type": "application/json", "accept": "application/json", "accept-encoding": "identity"}
    if key is not None:
        headers["authorization"] = f"Bearer {key}"
    content = bytearray()
    http.cookies.clear()  # a cookie of one answer must not go with the next question
    extensions = {GUARDED: is_policy_owned}
    try:
        stream = http.stream("POST", url, content=encode_json(body), headers=headers, extensions=extensions)
        async with stream as response:
            if 300 <= response.status_code < 400:
                raise AttemptFailed(f"it answered {response.status_code}: redirects are not followed")
            async for chunk in response.aiter_raw():
                content += chunk
                if len(content) > MAX_RESPONSE_BYTES:
                    raise AttemptFailed(f"it answered more than {MAX_RESPONSE_BYTES} bytes")
    except (httpx2.HTTPError, httpx2.InvalidURL, httpx2.StreamError) as error:
        raise AttemptFailed(f"it does not answer ({type(error).__name__})") from error
    return response.status_code, bytes(content)


def encode_json(body: Mapping[str, Any]) -> bytes:
    """Raises JobFailed."""
    try:
        return orjson.dumps(body)
    except orjson.JSONEncodeError as error:
        raise JobFailed(f"the turn cannot be encoded as JSON: {error}") from error


def decode_json(content: bytes) -> Any:
    """Raises AttemptFailed."""
    try:
        return orjson.loads(content)
    except orjson.JSONDecodeError as error:
        raise AttemptFailed("its answer is not JSON") from error


def quote_answer(answer: str, *, is_policy_owned: bool) -> str:
    """Return the start of the answer, to append to a reason.

    Empty where a project chose the address: its answer must not be passed on to whoever chose it.
    """
    return "" if is_policy_owned else f": {answer[:200]!r}"


def chat_completions_url(url: str) -> str:
    """Return the URL of the chat completions of an endpoint. A host alone gets /v1; a path is used as it is.

    Example: "http://127.0.0.1:8700" -> "http://127.0.0.1:8700/v1/chat/completions"
    """
    parts = urlsplit(url)
    path = parts.path.rstrip("/") or "/v1"
    if not path.endswith("/chat/completions"):
        path += "/chat/completions"
    return urlunsplit((parts.scheme, parts.netloc, path, parts.query, ""))


def find_secret(endpoint: EndpointConfig, settings: Settings, *, is_policy_owned: bool) -> str | None:
    """Return the endpoint's API key, None if it needs none. Raises JobFailed when the secret is not configured.

    A secret `name@host` is sent to that host only. A plain `name` is sent anywhere, for endpoints of the deployment's
    own settings only: whoever may write a policy's rewards could otherwise have it sent to a host of their own.
    """
    if endpoint.key is None:
        return None
    bound_name = f"{endpoint.key}@{urlsplit(endpoint.url).hostname}"
    for name in (bound_name,) if is_policy_owned else (bound_name, endpoint.key):
        if name in settings.secrets:
            return settings.secrets[name].get_secret_value()
    raise JobFailed(f"ATTUNE_SECRETS has no '{bound_name}'" + ("" if is_policy_owned else f" and no '{endpoint.key}'"))
