"""The wire to judges and services: one POST of JSON, bounded in time and size, and no redirects."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import httpx2
import orjson

from alignment.config.rewards import EndpointConfig
from app.core.settings import Settings
from workers.judging.request import Broken, Unanswered
from workers.judging.sources.address_guard import GUARDED, Doors

MOST_BYTES = 1 << 20


def client(settings: Settings) -> httpx2.AsyncClient:
    """How long it may take is said around each question, not here."""
    doors = Doors(settings.private_hosts)
    return httpx2.AsyncClient(transport=doors, trust_env=False, follow_redirects=False, timeout=None)


@asynccontextmanager
async def patience(seconds: float) -> AsyncIterator[None]:
    """All of it, from connecting to the last byte: an endpoint that drips does not hold us longer."""
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError as error:
        raise Unanswered(f"no answer within {seconds:g} s") from error


async def post(
    http: httpx2.AsyncClient, url: str, body: Mapping[str, Any], key: str | None, *, own: bool
) -> tuple[int, bytes]:
    """`own`: the URL is a project's word, not the deployment's, and may lead to public addresses only.

    Reasons name neither the URL nor the key: they are kept where tenants can read them.
    """
    headers = {"content-type": "application/json", "accept": "application/json", "accept-encoding": "identity"}
    if key is not None:
        headers["authorization"] = f"Bearer {key}"
    content = bytearray()
    http.cookies.clear()  # nothing that one answer sets goes with the next question
    try:
        asked = http.stream("POST", url, content=encoded(body), headers=headers, extensions={GUARDED: own})
        async with asked as response:
            if 300 <= response.status_code < 400:
                raise Unanswered(f"it answered {response.status_code}: redirects are not followed")
            async for piece in response.aiter_raw():
                content += piece
                if len(content) > MOST_BYTES:
                    raise Unanswered(f"it answered more than {MOST_BYTES} bytes")
    except (httpx2.HTTPError, httpx2.InvalidURL, httpx2.StreamError) as error:
        raise Unanswered(f"it does not answer ({type(error).__name__})") from error
    return response.status_code, bytes(content)


def encoded(body: Mapping[str, Any]) -> bytes:
    try:
        return orjson.dumps(body)
    except orjson.JSONEncodeError as error:
        raise Broken(f"the turn cannot be written as JSON: {error}") from error


def decoded(content: bytes) -> Any:
    try:
        return orjson.loads(content)
    except orjson.JSONDecodeError as error:
        raise Unanswered("its answer is not JSON") from error


def quoted(answer: str, *, own: bool) -> str:
    """For a reason. What an address of a project's choice says is not passed on to whoever chose it."""
    return "" if own else f": {answer[:200]!r}"


def chat_url(url: str) -> str:
    """A host alone gets /v1; a path is taken at its word.

    Example: "http://127.0.0.1:8700" -> "http://127.0.0.1:8700/v1/chat/completions"
    """
    parts = urlsplit(url)
    path = parts.path.rstrip("/") or "/v1"
    if not path.endswith("/chat/completions"):
        path += "/chat/completions"
    return urlunsplit((parts.scheme, parts.netloc, path, parts.query, ""))


def secret(endpoint: EndpointConfig, settings: Settings, *, own: bool) -> str | None:
    """`name@host` is good for that host alone. Only the deployment's own settings may send a plain `name` anywhere:
    who may write a policy's rewards could send it home."""
    if endpoint.key is None:
        return None
    bound = f"{endpoint.key}@{urlsplit(endpoint.url).hostname}"
    for name in (bound,) if own else (bound, endpoint.key):
        if name in settings.secrets:
            return settings.secrets[name].get_secret_value()
    raise Broken(f"ATTUNE_SECRETS has no '{bound}'" + ("" if own else f" and no '{endpoint.key}'"))
