"""The HTTP client that the commands use."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx2

from app.core.settings import Settings


def save_api_key(settings: Settings, key: str) -> None:
    """Save the key beside the embedded database, readable by its owner alone."""
    path = settings.credentials_file
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        json.dump({"api_key": key}, file)


def load_api_key(settings: Settings) -> str:
    """Return the configured API key, or the one that `attune up` has saved."""
    if settings.api_key:
        return settings.api_key
    if settings.credentials_file.exists():
        key: str = json.loads(settings.credentials_file.read_text())["api_key"]
        return key
    raise SystemExit("attune: set ATTUNE_API_KEY, or run this where `attune up` was started")


class CommandError(SystemExit):
    """An error that ends a command with a message and exit status 1."""

    def __init__(self, message: str) -> None:
        super().__init__(f"attune: {message}")


class Api:
    """A synchronous client of Attune's API. Every method raises CommandError with the service's error message."""

    def __init__(self, settings: Settings) -> None:
        self._http = httpx2.Client(
            base_url=settings.url,
            headers={"authorization": f"Bearer {load_api_key(settings)}"},
            timeout=settings.chat_timeout_seconds,
            trust_env=False,
        )

    def get(self, path: str, **params: Any) -> Any:
        return self._parse_response(self._send("GET", path, params=params))

    def list_all(self, path: str, **params: Any) -> list[dict[str, Any]]:
        """Return the rows of every page."""
        page = self.get(path, limit=100, **params)
        rows: list[dict[str, Any]] = page["data"]
        while page["has_more"]:
            page = self.get(path, limit=100, after=page["last_id"], **params)
            rows += page["data"]
        return rows

    def post(self, path: str, body: dict[str, Any]) -> Any:
        return self._parse_response(self._send("POST", path, json=body))

    def put(self, path: str, body: dict[str, Any]) -> Any:
        return self._parse_response(self._send("PUT", path, json=body))

    def delete(self, path: str) -> Any:
        return self._parse_response(self._send("DELETE", path))

    def stream_chat(self, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield the chunks of one streamed completion."""
        with self._stream("POST", "/v1/chat/completions", json=body) as response:
            for line in response.iter_lines():
                if line.startswith("data: ") and line != "data: [DONE]":
                    chunk = json.loads(line[6:])
                    if "error" in chunk:
                        raise CommandError(chunk["error"]["message"])
                    yield chunk

    @contextmanager
    def _stream(self, method: str, path: str, **options: Any) -> Iterator[httpx2.Response]:
        """Open a streamed response, or raise CommandError for an error status."""
        with self._translate_transport_errors(), self._http.stream(method, path, **options) as response:
            if response.status_code >= 400:
                response.read()
                self._parse_response(response)
            yield response

    def _send(self, method: str, path: str, **options: Any) -> httpx2.Response:
        with self._translate_transport_errors():
            return self._http.request(method, path, **options)

    @contextmanager
    def _translate_transport_errors(self) -> Iterator[None]:
        try:
            yield
        except httpx2.ConnectError as error:
            raise CommandError(f"no connection to {self._http.base_url}; is `attune up` running?") from error
        except httpx2.TransportError as error:
            raise CommandError(f"the connection failed: {error}") from error

    def _parse_response(self, response: httpx2.Response) -> Any:
        if response.status_code >= 400:
            raise CommandError(response.json()["error"]["message"])
        return response.json()
