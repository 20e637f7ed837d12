"""HTTP to tools, sandboxes and search services: one request of JSON, limited in size, without redirects and proxies.

The addresses come from whoever configures the environment. Messages name neither them nor the headers, which may hold
keys.
"""

import asyncio
import os
import ssl
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from functools import cache
from typing import NamedTuple

import httpx2
from pydantic import JsonValue

from alignment.environments.errors import InfrastructureFailure
from alignment.errors import UnavailableEnvironment

CONNECT_SECONDS = 3.0
ANSWER_SECONDS = 30.0  # until an answer is complete; a slower service is a failure of the host
MAX_BODY_BYTES = 1 << 20
REFUSED_KEYS = {401, 403}
HEADERS = {"accept-encoding": "identity"}


class Answer(NamedTuple):
    """A status and a body. `is_cut`: the body was longer than was read of it."""

    status: int
    text: str
    is_cut: bool = False

    @property
    def is_success(self) -> bool:
        return 200 <= self.status < 300


def open_client(headers: Mapping[str, str] | None = None) -> httpx2.AsyncClient:
    """Return a client without a limit on reads: `post_json` has one for the whole."""
    return httpx2.AsyncClient(
        headers=dict(headers or {}),
        timeout=httpx2.Timeout(None, connect=CONNECT_SECONDS),
        verify=default_ssl_context(),
        follow_redirects=False,
        trust_env=False,
    )


def bearer_headers(variable: str | None) -> dict[str, str]:
    """Return the header with the key that an environment variable holds; none without a variable.

    Arguments of environments are recorded with their episodes, so they name a key and do not hold it. Raises
    UnavailableEnvironment if the variable is not set, or holds what no header can.
    """
    if variable is None:
        return {}
    key = os.environ.get(variable, "").strip()
    if not (key and key.isascii() and key.isprintable()):
        raise UnavailableEnvironment(
            f"the environment variable {variable}, which `key_variable` names, must hold the server's key"
        )
    return {"authorization": f"Bearer {key}"}


def require_key(status: int, noun: str) -> None:
    """Raise UnavailableEnvironment if the status says that the server refuses the key: it would each attempt."""
    if status in REFUSED_KEYS:
        raise UnavailableEnvironment(
            f"{noun} has answered with {status}: name the environment variable of its key with `key_variable`"
        )


@cache
def default_ssl_context() -> ssl.SSLContext:
    """Return one context for all clients: each client of an episode would spend 20 ms on its own."""
    return ssl.create_default_context()


async def post_json(
    client: httpx2.AsyncClient,
    url: str,
    body: JsonValue,
    *,
    noun: str,
    seconds: float = ANSWER_SECONDS,
    max_bytes: int = MAX_BODY_BYTES,
) -> Answer:
    """Return the answer. Raises InfrastructureFailure if there is none; `noun` says in its message who was called."""
    return await _read(client.stream("POST", url, json=body, headers=HEADERS), noun, seconds, max_bytes)


async def get_json(
    client: httpx2.AsyncClient, url: str, *, noun: str, seconds: float = ANSWER_SECONDS, max_bytes: int = MAX_BODY_BYTES
) -> Answer:
    """Return the answer, as `post_json` does."""
    return await _read(client.stream("GET", url, headers=HEADERS), noun, seconds, max_bytes)


async def _read(
    sent: AbstractAsyncContextManager[httpx2.Response], noun: str, seconds: float, max_bytes: int
) -> Answer:
    content = bytearray()
    try:
        async with asyncio.timeout(seconds), sent as response:
            async for chunk in response.aiter_raw():
                content += chunk
                if len(content) > max_bytes:
                    break
            status = response.status_code
    except TimeoutError as error:
        raise InfrastructureFailure(f"{noun} does not answer within {seconds:g} s") from error
    except (httpx2.HTTPError, httpx2.InvalidURL, httpx2.StreamError) as error:
        raise InfrastructureFailure(f"{noun} does not answer ({type(error).__name__})") from error
    return Answer(status, bytes(content[:max_bytes]).decode("utf-8", "replace"), len(content) > max_bytes)
