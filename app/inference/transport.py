"""HTTP transport to one engine; translates connection errors and error responses into our own errors."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import aiohttp
import orjson

from app.inference.errors import AdapterMissing, EngineRefused, EngineUnavailable

# SGLang's uvicorn closes idle connections after five seconds; closing first avoids writing to a closing connection.
KEEPALIVE_SECONDS = 3.0
CONNECT_SECONDS = 2.0
HEADERS = {"content-type": "application/json", "accept-encoding": "identity"}


class EngineTransport:
    """A lazily opened aiohttp session. aiohttp's parser is in C: a request takes a quarter of the time of httpx."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self._session: aiohttp.ClientSession | None = None  # opened at first use, as it belongs to the running loop

    def open(
        self, method: str, path: str, body: dict[str, Any] | None, *, key: str | None, read_timeout: float
    ) -> "aiohttp.client._RequestContextManager":
        """Start a request, inside `translate_errors`. `read_timeout`: the longest time without data, in seconds."""
        if self._session is not None and self._session.closed:
            raise EngineUnavailable("This server is shutting down.")
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_SECONDS)
            self._session = aiohttp.ClientSession(connector=connector, headers=HEADERS, auto_decompress=False)
        return self._session.request(
            method,
            self.url + path,
            data=None if body is None else orjson.dumps(body),
            headers=None if key is None else {"authorization": f"Bearer {key}"},
            timeout=aiohttp.ClientTimeout(sock_connect=min(CONNECT_SECONDS, read_timeout), sock_read=read_timeout),
        )

    async def request(
        self, method: str, path: str, body: dict[str, Any] | None = None, *, key: str | None, read_timeout: float
    ) -> Any:
        """Send a request and return the parsed JSON. Raises EngineUnavailable, AdapterMissing or EngineRefused."""
        with self.translate_errors():
            async with self.open(method, path, body, key=key, read_timeout=read_timeout) as response:
                content = await response.read()
        if response.status >= 400:
            raise to_engine_error(response.status, content)
        return orjson.loads(content) if content else None

    @contextmanager
    def translate_errors(self) -> Iterator[None]:
        try:
            yield
        except aiohttp.ClientConnectorError as error:
            raise EngineUnavailable(f"The engine at {self.url} cannot be reached.") from error
        except TimeoutError as error:
            raise EngineUnavailable(f"The engine at {self.url} did not respond in time.") from error
        except (aiohttp.ClientError, ConnectionError) as error:
            raise EngineUnavailable(f"The engine at {self.url} closed the connection.") from error

    async def aclose(self) -> None:
        if self._session is not None:
            await self._session.close()


def to_engine_error(status: int, content: bytes) -> EngineUnavailable | EngineRefused:
    """Return the error for an error response of SGLang."""
    message = _error_message(content) or f"The engine responded with status {status}."
    if "LoRA adapter that has never been loaded" in message:
        return AdapterMissing("The engine does not hold the requested version.")
    if status >= 500 or status == 429:
        return EngineUnavailable(f"The engine failed: {message}")
    return EngineRefused(status, message)


def _error_message(content: bytes) -> str | None:
    """Return the message of an error response; SGLang uses several formats."""
    try:
        body = orjson.loads(content)
    except orjson.JSONDecodeError:
        return content.decode("utf-8", "replace").strip()
    if not isinstance(body, dict):
        return None
    error = body.get("error")
    message = error.get("message") if isinstance(error, dict) else error
    return message or body.get("message") or body.get("error_message")
