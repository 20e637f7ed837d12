"""HTTP transport to one engine; translates connection errors and error responses into our own errors.

AttuneError
├── Unavailable
│   └── EngineUnavailable     connection refused or lost, or an error of the engine: try another replica, or later
│       ├── AdapterMissing    the engine runs, but does not hold the requested version
│       └── EngineTimeout     no answer in time
└── EngineRefused             the engine rejected the request: a retry will not help
"""

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import orjson

from app.core.errors import AttuneError, Unavailable

# The engines' uvicorn closes idle connections after five seconds; closing first avoids writing to a closing connection.
KEEPALIVE_SECONDS = 3.0
CONNECT_SECONDS = 2.0
HEADERS = {"content-type": "application/json", "accept-encoding": "identity"}


class EngineUnavailable(Unavailable):
    pass


class AdapterMissing(EngineUnavailable):
    pass


class EngineTimeout(EngineUnavailable):
    pass


class EngineRefused(AttuneError):
    """The engine rejected a request. A mistake of the client results in 400, anything else (a wrong key) in 502.

    `is_too_long`: the prompt and its reply exceed the context length.
    """

    def __init__(self, engine_status: int, message: str, *, is_too_long: bool = False) -> None:
        code, param = ("context_length_exceeded", "messages") if is_too_long else ("engine_refused", None)
        super().__init__(message, code=code, param=param)
        self.engine_status = engine_status
        self.status = 400 if engine_status in (400, 413, 422) else 502
        if self.status == 502:
            self.type = "server_error"

    @property
    def is_fault_of_request(self) -> bool:
        """Whether the request is to blame. Otherwise the service is, for example by a wrong key."""
        return self.status == 400


# From the status and the content of an error response.
ToError = Callable[[int, bytes], EngineUnavailable | EngineRefused]


class EngineTransport:
    """A lazily opened aiohttp session. aiohttp's parser is in C: a request takes a quarter of the time of httpx.

    `read_timeout`: the longest time without data, in seconds, for requests without a timeout of their own.
    `to_error`: what an error response of this kind of engine means.
    """

    def __init__(
        self, url: str, api_key: str | None, admin_key: str | None, read_timeout: float, to_error: ToError
    ) -> None:
        self.url, self.read_timeout = url.rstrip("/"), read_timeout
        self.to_error = to_error
        self._api_key, self._admin_key = api_key, admin_key
        self._session: aiohttp.ClientSession | None = None  # opened at first use, as it belongs to the running loop

    @asynccontextmanager
    async def open(
        self,
        path: str,
        body: Mapping[str, object] | None = None,
        *,
        admin: bool = False,
        read_timeout: float | None = None,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Send a POST, or without a body a GET, and yield the response. `admin`: with the admin key.

        Errors of the connection, inside the block too, and error responses are raised as EngineUnavailable,
        AdapterMissing or EngineRefused.
        """
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_SECONDS)
            self._session = aiohttp.ClientSession(connector=connector, headers=HEADERS, auto_decompress=False)
        if self._session.closed:
            raise EngineUnavailable("This server is shutting down.")
        key, timeout = self._admin_key if admin else self._api_key, read_timeout or self.read_timeout
        try:
            async with self._session.request(
                "GET" if body is None else "POST",
                self.url + path,
                data=None if body is None else orjson.dumps(body),
                headers=None if key is None else {"authorization": f"Bearer {key}"},
                timeout=aiohttp.ClientTimeout(sock_connect=min(CONNECT_SECONDS, timeout), sock_read=timeout),
            ) as response:
                if response.status >= 400:
                    raise self.to_error(response.status, await response.read())
                yield response
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            raise EngineUnavailable(f"The engine at {self.url} cannot be reached.") from error
        except TimeoutError as error:
            raise EngineTimeout(f"The engine at {self.url} did not respond in time.") from error
        except (aiohttp.ClientError, ConnectionError) as error:
            raise EngineUnavailable(f"The engine at {self.url} closed the connection.") from error

    async def request(
        self,
        path: str,
        body: Mapping[str, object] | None = None,
        *,
        admin: bool = False,
        read_timeout: float | None = None,
    ) -> Any:
        """Send a request and return the parsed JSON, or None for an answer without. Options and errors are those of
        `open`."""
        async with self.open(path, body, admin=admin, read_timeout=read_timeout) as response:
            content = await response.read()
            is_json = response.content_type == "application/json"
        return orjson.loads(content) if content and is_json else None

    async def aclose(self) -> None:
        if self._session is not None:
            await self._session.close()


def error_message(content: bytes) -> str | None:
    """Return the message of an error response; engines use several formats."""
    try:
        body = orjson.loads(content)
    except orjson.JSONDecodeError:
        return content.decode("utf-8", "replace").strip()
    if not isinstance(body, dict):
        return None
    error = body.get("error")
    message = error.get("message") if isinstance(error, dict) else error
    return message or body.get("message") or body.get("error_message")
