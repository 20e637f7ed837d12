"""Attune's own API, as the command line calls it."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx2

from app.core.settings import Settings


def save_key(settings: Settings, key: str) -> None:
    """Kept beside the embedded database, for its owner alone, so that the command line works on the same machine."""
    path = settings.credentials_file
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        json.dump({"api_key": key}, file)


def saved_key(settings: Settings) -> str:
    if settings.api_key:
        return settings.api_key
    if settings.credentials_file.exists():
        key: str = json.loads(settings.credentials_file.read_text())["api_key"]
        return key
    raise SystemExit("attune: set ATTUNE_API_KEY, or run this where `attune up` was started")


class Refused(SystemExit):
    """What the service would not do, as a sentence: it ends a command, and not a conversation."""

    def __init__(self, message: str) -> None:
        super().__init__(f"attune: {message}")


class Api:
    def __init__(self, settings: Settings) -> None:
        self._http = httpx2.Client(
            base_url=settings.url,
            headers={"authorization": f"Bearer {saved_key(settings)}"},
            timeout=settings.chat_timeout_seconds,
            trust_env=False,
        )

    def get(self, path: str, **params: Any) -> Any:
        return self._answer(self._send("GET", path, params=params))

    def post(self, path: str, body: dict[str, Any]) -> Any:
        return self._answer(self._send("POST", path, json=body))

    def put(self, path: str, body: dict[str, Any]) -> Any:
        return self._answer(self._send("PUT", path, json=body))

    def delete(self, path: str) -> Any:
        return self._answer(self._send("DELETE", path))

    def stream(self, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """The chunks of one streamed reply."""
        with self._in_sentences(), self._http.stream("POST", "/v1/chat/completions", json=body) as response:
            if response.status_code >= 400:
                response.read()
                self._answer(response)
            for line in response.iter_lines():
                if line.startswith("data: ") and line != "data: [DONE]":
                    chunk = json.loads(line[6:])
                    if "error" in chunk:
                        raise Refused(chunk["error"]["message"])
                    yield chunk

    def _send(self, method: str, path: str, **options: Any) -> httpx2.Response:
        with self._in_sentences():
            return self._http.request(method, path, **options)

    @contextmanager
    def _in_sentences(self) -> Iterator[None]:
        try:
            yield
        except httpx2.ConnectError as error:
            raise Refused(f"nothing answers at {self._http.base_url}; is `attune up` running?") from error
        except httpx2.TransportError as error:
            raise Refused(f"the connection broke off: {error}") from error

    def _answer(self, response: httpx2.Response) -> Any:
        if response.status_code >= 400:
            raise Refused(response.json()["error"]["message"])
        return response.json()
