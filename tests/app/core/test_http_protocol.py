"""Connections whose request headers are too large or never complete, or whose bodies are slow, over real sockets."""

import select
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from typing import Any
from unittest.mock import patch

import pytest
import uvicorn

from app.cli import server
from app.core import http_protocol
from app.core.connection_limit import ConnectionLimit, TrustedProxies
from app.core.draining_server import DrainingServer
from app.core.settings import Settings
from tests.support import scripted_engine


async def echo(scope: Any, receive: Any, send: Any) -> None:
    """Answer with the size of the body; /early without reading it."""
    size = 0
    if scope["path"] == "/early":
        await send({"type": "http.response.start", "status": 401, "headers": [(b"content-length", b"7")]})
        await send({"type": "http.response.body", "body": b"refused"})
        return
    while (message := await receive())["type"] == "http.request":
        size += len(message["body"])
        if not message["more_body"]:
            break
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"7")]})
    await send({"type": "http.response.body", "body": b"%07d" % size})


@pytest.fixture
def connection(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """Yield a connection to a server that `attune serve` has configured; the parameter is its section `server`.

    With a limit of connections, which is one of the section `limits`, no address is trusted.
    """
    options = dict(getattr(request, "param", {}))
    limits = {name: options.pop(name) for name in ("max_connections_per_address",) if name in options}
    monkeypatch.setenv("FORWARDED_ALLOW_IPS", "" if limits else "127.0.0.1")
    monkeypatch.setattr(server, "get_settings", lambda: Settings(server=options, limits=limits))
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
    connection.settimeout(30)
    monkeypatch.setattr(http_protocol, "BODY_SECONDS", 2.0)
    monkeypatch.setattr(http_protocol, "MIN_BODY_BYTES", 1)  # however slow this machine is, it sends that in 2 s
    head = b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 200000\r\n\r\n"
    connection.sendall(head)
    for _ in range(200):
        connection.sendall(b"x" * 1000)
        time.sleep(0.015)
    assert read(connection).endswith(b"0200000")
    monkeypatch.setattr(http_protocol, "MIN_BODY_BYTES", 1000)
    connection.sendall(head + b"x" * 100)
    response = read(connection)
    assert response.startswith(b"HTTP/1.1 408") and b'"code":"request_timeout"' in response


def trickle(client: socket.socket, rate: int, seconds: float) -> tuple[bytes, bool]:
    """Send `rate` bytes each 50 ms, however the server answers. Return what it sent, and whether it closed."""
    received, ends = b"", time.monotonic() + seconds
    while time.monotonic() < ends:
        with suppress(ConnectionError):
            client.sendall(b"x" * rate)
        if select.select([client], [], [], 0.05)[0]:
            try:
                part = client.recv(65536)
            except ConnectionError:
                return received, True
            if not part and not received:
                return received, True
            received += part
            if not part and _is_reset(client):
                return received, True
    return received, False


def _is_reset(client: socket.socket) -> bool:
    """Whether the server has closed the connection for both directions."""
    try:
        client.sendall(b"x")
        time.sleep(0.02)
        client.sendall(b"x")
    except ConnectionError:
        return True
    return False


@pytest.mark.parametrize("connection", [{"max_body_seconds": 1.0}], indirect=True)
def test_body_that_takes_too_long_is_refused_however_steadily_it_comes(
    connection: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_protocol, "BODY_SECONDS", 0.2)
    monkeypatch.setattr(http_protocol, "MIN_BODY_BYTES", 1000)
    connection.sendall(b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 100000000\r\n\r\n")
    response, is_closed = trickle(connection, 1000, 30)
    assert response.startswith(b"HTTP/1.1 408") and is_closed


def test_connection_is_closed_after_an_answer_without_the_body(
    connection: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its client cannot keep it by sending on."""
    monkeypatch.setattr(http_protocol, "LINGER_SECONDS", 0.3)
    connection.sendall(b"POST /early HTTP/1.1\r\nhost: a\r\ncontent-length: 100000000\r\n\r\n")
    response, is_closed = trickle(connection, 100_000, 30)
    assert response.startswith(b"HTTP/1.1 401") and b"connection: close" in response and response.endswith(b"refused")
    assert is_closed


def test_client_that_sends_its_whole_body_first_reads_the_early_answer(connection: socket.socket) -> None:
    size = 8_000_000
    connection.sendall(b"POST /early HTTP/1.1\r\nhost: a\r\ncontent-length: %d\r\n\r\n" % size + b"x" * size)
    response = b""
    while part := connection.recv(65536):
        response += part
    assert response.startswith(b"HTTP/1.1 401") and response.endswith(b"refused")


@pytest.mark.parametrize("body", [b"", b"x" * 1000])
def test_connection_is_kept_after_an_answer_without_reading_a_body_that_has_arrived(
    connection: socket.socket, body: bytes
) -> None:
    for _ in range(3):
        connection.sendall(b"POST /early HTTP/1.1\r\nhost: a\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
        response = b""
        while not response.endswith(b"refused"):
            part = connection.recv(65536)
            assert part, response
            response += part
        assert b"connection: close" not in response


@pytest.mark.parametrize("connection", [{"max_connections_per_address": 3}], indirect=True)
def test_connections_of_an_address_are_limited(connection: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is too many is refused, however it sends; a place is free again when another one is closed."""
    with ExitStack() as stack:

        def connect() -> socket.socket:
            client = stack.enter_context(socket.create_connection(connection.getpeername(), timeout=20))
            client.sendall(b"GET / HTTP/1.1\r\nhost: a\r\n\r\n")
            return client

        others = [connect() for _ in range(2)]
        assert all(read(client).endswith(b"0000000") for client in others)
        refused = connect()
        refused.sendall(b"x" * 1000)
        response = b""
        while part := refused.recv(65536):
            response += part
        assert response.startswith(b"HTTP/1.1 429") and b"retry-after: 1\r\n" in response
        assert b'"code":"too_many_connections"' in response
        refused.close()
        others[0].close()
        while not (response := read(client := connect())).endswith(b"0000000"):  # it learns of it in its own time
            assert response.startswith(b"HTTP/1.1 429")
            client.close()  # a loop on a busy machine would run out of file descriptors
            time.sleep(0.05)
        connection.sendall(b"GET / HTTP/1.1\r\nhost: a\r\n\r\n")
        assert read(connection).endswith(b"0000000")


def test_connections_of_a_proxy_are_not_limited() -> None:
    limit = ConnectionLimit(1, TrustedProxies("10.1.0.0/16, 192.0.2.7,2001:db8::/32"))
    for proxy in ("10.1.2.3", "192.0.2.7", "2001:db8::1"):
        assert [limit.admit(proxy) for _ in range(3)] == [True] * 3
    for client in ("10.2.2.3", "::ffff:192.0.2.8", "2001:db9::1", "unix"):
        assert [limit.admit(client) for _ in range(2)] == [True, False]
        limit.release(client)
        assert not limit.admit(client)
    assert not limit.admit("192.0.2.8") and not limit.admit("2001:db9::2"), "they are the same client"
    assert all(ConnectionLimit(0, TrustedProxies(hosts)).admit("192.0.2.9") for hosts in ("*", ["192.0.2.9"]))
