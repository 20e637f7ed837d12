"""The HTTP client that the commands use."""

import json
import os
import ssl
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import httpx2

from app.cli.up_record import read_running
from app.core.settings import Settings, get_settings
from app.inference.chat_format import ChatChunk

Answer = dict[str, Any]  # a JSON object that the service answers; the commands know its fields


class CommandError(SystemExit):
    """An error that ends a command with a message and exit status 1.

    `retry_after` is set where the same request may succeed so many seconds later.
    """

    def __init__(self, message: str, retry_after: float | None = None) -> None:
        super().__init__(f"attune: {message}")
        self.retry_after = retry_after


class ConnectionLost(CommandError):
    """The service was not reached, or did not answer: it may have done what was asked."""


def iterate_lines(response: httpx2.Response) -> Iterator[bytes]:
    """Yield the lines of a streamed response. httpx would also split at the line breaks of Unicode in a text."""
    rest = b""
    for chunk in response.iter_bytes():
        *lines, rest = (rest + chunk).split(b"\n")
        yield from lines
    if rest:
        yield rest


def save_api_key(settings: Settings, key: str) -> None:
    """Save the key beside the embedded database, readable by its owner alone."""
    path = settings.credentials_file
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        os.fchmod(file.fileno(), 0o600)  # a file that exists keeps its permissions
        json.dump({"api_key": key}, file)


def service_url(settings: Settings) -> str:
    """Return the URL of the service: the configured one, or that of the `attune up` with this home."""
    if settings.url is not None:
        return settings.url.rstrip("/").removesuffix("/v1")
    if (
        not (settings.is_set("server.host") or settings.is_set("server.port"))
        and (running := read_running(settings)) is not None
    ):
        return running.url  # of `attune up --port`
    return settings.local_url


def tls_context(settings: Settings) -> ssl.SSLContext:
    """Return what verifies the service's certificate. Raises CommandError if the file of authorities is unusable."""
    try:
        return ssl.create_default_context(cafile=settings.ca_file)
    except OSError as error:  # ssl.SSLError is one
        raise CommandError(f"ATTUNE_CA_FILE {settings.ca_file} has no usable certificate: {error}") from error


def load_api_key(settings: Settings) -> str:
    """Return the configured API key, or the one that `attune up` has saved, which no other service is sent."""
    if settings.api_key:
        return settings.api_key
    if settings.url is not None and service_url(settings) != settings.local_url:
        raise CommandError(f"set ATTUNE_API_KEY to a key of {settings.url}")
    if settings.credentials_file.exists():
        return str(json.loads(settings.credentials_file.read_text())["api_key"])
    raise CommandError(
        f"no API key: there is no {settings.credentials_file}; set ATTUNE_API_KEY, or run this where `attune up` was "
        "started, or set ATTUNE_HOME to its --home"
    )


def drop_unset(**params: object) -> dict[str, object]:
    """Return the parameters that are not None."""
    return {name: value for name, value in params.items() if value is not None}


def _error_message(response: httpx2.Response) -> str:
    try:
        return str(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):  # of a proxy, or of another service
        return f"{response.url} answered with status {response.status_code}, not as Attune does; is ATTUNE_URL right?"


def _retry_after(response: httpx2.Response) -> float | None:
    if response.status_code not in (429, 503):
        return None
    seconds = response.headers.get("retry-after", "")
    return float(seconds) if seconds.isdecimal() else 1.0


class Api:
    """A synchronous client of Attune's API. Every method raises CommandError with the service's error message."""

    def __init__(self, settings: Settings | None = None) -> None:
        settings = settings or get_settings()
        self._http = httpx2.Client(
            base_url=service_url(settings),
            headers={"authorization": f"Bearer {load_api_key(settings)}"},
            timeout=settings.server.chat_timeout_seconds,
            verify=tls_context(settings),
            trust_env=False,
        )

    @contextmanager
    def stream(self, method: str, path: str, **options: Any) -> Iterator[httpx2.Response]:
        """Open a response whose body the caller reads."""
        try:
            with self._http.stream(method, path, **options) as response:
                if response.status_code >= 400:
                    response.read()
                    raise CommandError(_error_message(response), _retry_after(response))
                yield response
        except httpx2.ConnectError as error:
            if "CERTIFICATE_VERIFY_FAILED" in str(error):
                raise CommandError(
                    f"the certificate of {self._http.base_url} is not trusted ({error}); ATTUNE_CA_FILE names the file "
                    "of its authority"
                ) from error
            raise ConnectionLost(f"no connection to {self._http.base_url}; is `attune up` running?") from error
        except httpx2.TransportError as error:
            raise ConnectionLost(f"the connection failed: {error}") from error

    def _request(self, method: str, path: str, **options: Any) -> Any:
        with self.stream(method, path, **options) as response:
            response.read()
            return response.json()

    def get(self, path: str, **params: object) -> Any:
        """Parameters that are None are not sent."""
        return self._request("GET", path, params=drop_unset(**params))

    def list_all(self, path: str, **params: object) -> list[Answer]:
        """Return the rows of every page."""
        page = self.get(path, limit=100, **params)
        rows: list[Answer] = page["data"]
        while page["has_more"]:
            page = self.get(path, limit=100, after=page["last_id"], **params)
            rows += page["data"]
        return rows

    def post(self, path: str, body: Mapping[str, object]) -> Any:
        return self._request("POST", path, json=body)

    def put(self, path: str, body: Mapping[str, object]) -> Any:
        return self._request("PUT", path, json=body)

    def patch(self, path: str, body: Mapping[str, object]) -> Any:
        return self._request("PATCH", path, json=body)

    def delete(self, path: str) -> Any:
        return self._request("DELETE", path)

    def stream_chat(self, body: Mapping[str, object]) -> Iterator[ChatChunk]:
        """Yield the chunks of one streamed completion."""
        with self.stream("POST", "/v1/chat/completions", json=body) as response:
            for line in iterate_lines(response):
                if line.startswith(b"data: ") and line.rstrip() != b"data: [DONE]":
                    chunk = json.loads(line[6:])
                    if "error" in chunk:
                        raise CommandError(chunk["error"]["message"])
                    yield chunk
