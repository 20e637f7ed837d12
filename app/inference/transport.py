"""The wire to one replica: HTTP in, sentences out."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import aiohttp
import orjson

from app.inference.errors import AdapterMissing, EngineRefused, EngineUnavailable

# SGLang's uvicorn drops idle connections after five seconds; leaving first avoids writing into a closing one.
IDLE_SECONDS = 3.0
CONNECT_SECONDS = 2.0
HEADERS = {"content-type": "application/json", "accept-encoding": "identity"}


class EngineTransport:
    """aiohttp, because its parser is in C: a call costs a quarter of what it costs in httpx, and a chat is two."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self._session: aiohttp.ClientSession | None = None  # made at first use: it belongs to the running loop

    def open(
        self, method: str, path: str, body: dict[str, Any] | None, *, key: str | None, patience: float
    ) -> "aiohttp.client._RequestContextManager":
        """`patience`: the longest silence, in seconds, that is still taken for work. Use it within `in_sentences`."""
        if self._session is not None and self._session.closed:
            raise EngineUnavailable("This server is stopping.")
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_SECONDS)
            self._session = aiohttp.ClientSession(connector=connector, headers=HEADERS, auto_decompress=False)
        return self._session.request(
            method,
            self.url + path,
            data=None if body is None else orjson.dumps(body),
            headers=None if key is None else {"authorization": f"Bearer {key}"},
            timeout=aiohttp.ClientTimeout(sock_connect=min(CONNECT_SECONDS, patience), sock_read=patience),
        )

    async def ask(
        self, method: str, path: str, body: dict[str, Any] | None = None, *, key: str | None, patience: float
    ) -> Any:
        with self.in_sentences():
            async with self.open(method, path, body, key=key, patience=patience) as response:
                content = await response.read()
        if response.status >= 400:
            raise refusal(response.status, content)
        return orjson.loads(content) if content else None

    @contextmanager
    def in_sentences(self) -> Iterator[None]:
        try:
            yield
        except aiohttp.ClientConnectorError as error:
            raise EngineUnavailable(f"The engine at {self.url} does not answer.") from error
        except TimeoutError as error:
            raise EngineUnavailable(f"The engine at {self.url} did not answer in time.") from error
        except (aiohttp.ClientError, ConnectionError) as error:
            raise EngineUnavailable(f"The engine at {self.url} broke off.") from error

    async def aclose(self) -> None:
        if self._session is not None:
            await self._session.close()


def refusal(status: int, content: bytes) -> EngineUnavailable | EngineRefused:
    """SGLang speaks of its troubles in several shapes."""
    message = _message(content) or f"The engine answered {status}."
    if "LoRA adapter that has never been loaded" in message:
        return AdapterMissing("The engine does not hold the version that was asked for.")
    if status >= 500 or status == 429:
        return EngineUnavailable(f"The engine failed: {message}")
    return EngineRefused(status, message)


def _message(content: bytes) -> str | None:
    try:
        body = orjson.loads(content)
    except orjson.JSONDecodeError:
        return content.decode("utf-8", "replace").strip()
    if not isinstance(body, dict):
        return None
    nested = body.get("error")
    told = nested.get("message") if isinstance(nested, dict) else nested
    return told or body.get("message") or body.get("error_message")
