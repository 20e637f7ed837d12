"""The wire to one replica: HTTP in, sentences out."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx2
import orjson

from app.engine.errors import AdapterMissing, EngineRefused, EngineUnavailable

# SGLang's uvicorn drops idle connections after five seconds; leaving first avoids writing into a closing one.
IDLE_SECONDS = 3.0
MOST_IDLE = 128
CONNECT_SECONDS = 2.0


class Wire:
    def __init__(self, url: str, *, transport: httpx2.AsyncBaseTransport | None = None) -> None:
        self.url = url.rstrip("/")
        self.http = httpx2.AsyncClient(
            base_url=self.url,
            headers={"content-type": "application/json", "accept-encoding": "identity"},
            limits=httpx2.Limits(max_keepalive_connections=MOST_IDLE, keepalive_expiry=IDLE_SECONDS),
            trust_env=False,  # an engine is never behind a proxy
            transport=transport,
        )

    def request(
        self, method: str, path: str, body: dict[str, Any] | None, *, key: str | None, patience: float
    ) -> httpx2.Request:
        """`patience`: the longest silence, in seconds, that is still taken for work."""
        return self.http.build_request(
            method,
            path,
            content=None if body is None else orjson.dumps(body),
            headers={} if key is None else {"authorization": f"Bearer {key}"},
            timeout=httpx2.Timeout(patience, connect=min(CONNECT_SECONDS, patience)),
        )

    async def ask(
        self, method: str, path: str, body: dict[str, Any] | None = None, *, key: str | None, patience: float
    ) -> Any:
        with self.in_sentences():
            response = await self.http.send(self.request(method, path, body, key=key, patience=patience))
        if response.status_code >= 400:
            raise refusal(response.status_code, response.content)
        return orjson.loads(response.content) if response.content else None

    @contextmanager
    def in_sentences(self) -> Iterator[None]:
        try:
            yield
        except httpx2.ConnectError as error:
            raise EngineUnavailable(f"The engine at {self.url} does not answer.") from error
        except httpx2.TimeoutException as error:
            raise EngineUnavailable(f"The engine at {self.url} did not answer in time.") from error
        except httpx2.TransportError as error:
            raise EngineUnavailable(f"The engine at {self.url} broke off.") from error

    async def aclose(self) -> None:
        await self.http.aclose()


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
