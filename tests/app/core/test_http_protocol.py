"""Connections whose request headers are too large or never complete, or whose bodies are slow, over real sockets."""

import socket
import sys
import time
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import pytest
import uvicorn

from app.cli import server
from app.core import http_protocol
from app.core.draining_server import DrainingServer
from app.core.settings import Settings
from tests.support import scripted_engine


async def echo(scope: Any, receive: Any, send: Any) -> None:
    size = 0
    while (message := await receive())["type"] == "http.request":
        size += len(message["body"])
        if not message["more_body"]:
            break
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"7")]})
    await send({"type": "http.response.body", "body": b"%07d" % size})


@pytest.fixture
def connection(monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """Yield a connection to a server that `attune serve` has configured."""
    monkeypatch.setattr(server, "get_settings", Settings)
    monkeypatch.setattr(server, "require_compatible_schema", lambda *arguments: None)
    monkeypatch.setattr(server, "create_default_project", lambda *arguments: None)
    switch_intervals: list[float] = []
    monkeypatch.setattr(sys, "setswitchinterval", switch_intervals.append)
    configs: list[uvicorn.Config] = []
    monkeypatch.setattr(DrainingServer, "run", lambda self: configs.append(self.config))
    server.serve()
    [configured] = configs
    assert switch_intervals == [0.0005]
    assert configured.timeout_keep_alive == 75
    limited: dict[str, Any] = {"http": configured.http, "timeout_keep_alive": configured.timeout_keep_alive}
    config = uvicorn.Config
    with (
        patch.object(uvicorn, "Config", lambda app, **values: config(app, **values, **limited)),
        scripted_engine.serve(echo) as url,
        socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])), timeout=20) as client,
    ):
        yield client


def read(client: socket.socket) -> bytes:
    """Return what arrives until the connection is closed or a response has arrived."""
    data = b""
    try:
        while not data.endswith(tuple(b"%07d" % size for size in (0, 200_000))) and (part := client.recv(65536)):
            data += part
    except ConnectionError:
        pass
    return data


@pytest.mark.parametrize("header", [b"x-a: b\r\n" * 20_000, b"x-a: " + b"b" * 200_000])
def test_large_headers_are_refused(connection: socket.socket, header: bytes) -> None:
    connection.settimeout(5)
    connection.sendall(b"GET / HTTP/1.1\r\nhost: a\r\n" + header)
    assert read(connection).startswith(b"HTTP/1.1 431")


@pytest.mark.parametrize("sent", [b"", b"GET / HTTP/1.1\r\nhost: a\r\n", b"G"])
def test_connection_with_incomplete_headers_is_closed(
    connection: socket.socket, monkeypatch: pytest.MonkeyPatch, sent: bytes
) -> None:
    connection.settimeout(5)
    monkeypatch.setattr(http_protocol, "HEADER_SECONDS", 0.2)
    with socket.create_connection(connection.getpeername(), timeout=5) as client:
        client.sendall(sent)
        assert read(client) == b""


def test_large_body_and_next_request_are_answered(connection: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_protocol, "HEADER_SECONDS", 0.2)
    for size in (200_000, 0, 200_000):
        connection.sendall(b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: %d\r\n\r\n" % size + b"x" * size)
        assert read(connection).endswith(b"%07d" % size)
    connection.sendall(b"GET")
    assert read(connection) == b""


def test_slow_body_is_refused_and_one_that_keeps_coming_is_not(
    connection: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    connection.settimeout(10)
    monkeypatch.setattr(http_protocol, "BODY_SECONDS", 0.5)
    head = b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 200000\r\n\r\n"
    connection.sendall(head)
    for _ in range(200):
        connection.sendall(b"x" * 1000)
        time.sleep(0.005)
    assert read(connection).endswith(b"0200000")
    connection.sendall(head + b"x" * 100)
    response = read(connection)
    assert response.startswith(b"HTTP/1.1 408") and b'"code":"request_timeout"' in response
