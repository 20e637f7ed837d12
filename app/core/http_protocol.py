"""Limits of the connections of an address, and of a connection while it sends a request: the size of its headers, the
time for them, the rate of its body and the time for all of it.

With httptools uvicorn limits none of them. Its keep-alive time-out stops as soon as the client sends a byte, and it
reads a body to its end that was answered without it.
"""

import asyncio
from collections.abc import Callable
from typing import Any, cast

import orjson
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from app.core.connection_limit import ConnectionLimit
from app.core.errors import AttuneError, RateLimited

MAX_HEADER_BYTES = 64 * 1024
HEADER_SECONDS = 20.0
BODY_SECONDS = 20.0  # a body is complete within this time, or it has brought MIN_BODY_BYTES in each such span
MIN_BODY_BYTES = 64 * 1024
LINGER_SECONDS = 5.0  # a client that still sends its body has this time to read the answer that it got without it
REFUSED_SECONDS = 1.0  # a client whose connection is one too many has this time to read so
TOO_LARGE = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\ncontent-type: text/plain\r\n"
    b"content-length: 43\r\n\r\nThe headers of a request may have 64 KiB.\r\n"
)


def _closing_response(status: bytes, error: AttuneError) -> bytes:
    body = orjson.dumps(error.body())
    head = b"HTTP/1.1 %s\r\nconnection: close\r\ncontent-type: application/json\r\n" % status
    return head + b"content-length: %d\r\n\r\n%s" % (len(body), body)


TOO_SLOW = _closing_response(
    b"408 Request Timeout", AttuneError("The body of the request arrived too slowly.", code="request_timeout")
)
TOO_MANY = _closing_response(
    b"429 Too Many Requests\r\nretry-after: 1",
    RateLimited(
        "This address has too many open connections: reuse or close some (ATTUNE_LIMITS__MAX_CONNECTIONS_PER_ADDRESS). "
        "If it is a proxy's, name it in FORWARDED_ALLOW_IPS.",
        code="too_many_connections",
    ),
)


class _CycleTransport:
    """The transport of one request and its response, which closes the connection in the protocol's way."""

    def __init__(self, transport: asyncio.Transport, close: Callable[[], None]) -> None:
        self._transport, self.close = transport, close

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class LimitedHttpProtocol(HttpToolsProtocol):
    """uvicorn's protocol, which closes a connection whose headers are too large or whose requests arrive too slowly.

    A response that begins before its request's body has arrived ends the connection, too: what follows is not read.
    """

    max_body_seconds = 600.0  # that a body may take in all
    connection_limit: ConnectionLimit | None = None  # of the process

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._num_header_bytes = 0
        self._is_reading_headers = True
        self._header_timer: asyncio.TimerHandle | None = None
        self._body_timer: asyncio.TimerHandle | None = None
        self._num_body_bytes = 0  # since the body's timer has started
        self._body_began_at = 0.0
        self._keeps_alive = True  # whether the connection may be used again after the present request
        self._is_stopping = False
        self._linger_timer: asyncio.TimerHandle | None = None
        self._start_timer()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if self.connection_limit is None or self.client is None or self.connection_limit.admit(self.client[0]):
            return
        self._stop_timer()
        transport.write(TOO_MANY)
        self._linger(REFUSED_SECONDS)

    def connection_lost(self, exc: Exception | None) -> None:
        if self.connection_limit is not None and self.client is not None:
            self.connection_limit.release(self.client[0])
        self._stop_timer()
        self._stop_body_timer()
        if self._linger_timer is not None:
            self._linger_timer.cancel()
        super().connection_lost(exc)

    def shutdown(self) -> None:
        self._is_stopping = True
        super().shutdown()

    def data_received(self, data: bytes) -> None:
        if self._linger_timer is not None:
            return  # the rest of a body that was answered without it
        if self._is_reading_headers:
            self._num_header_bytes += len(data)
            if self._header_timer is None:
                self._start_timer()
        super().data_received(data)
        if self._is_reading_headers and self._num_header_bytes > MAX_HEADER_BYTES and not self.transport.is_closing():
            self.transport.write(TOO_LARGE)
            self.transport.close()

    def on_headers_complete(self) -> None:
        self._is_reading_headers, self._num_header_bytes = False, 0
        self._stop_timer()
        self._body_began_at = self.loop.time()
        self._start_body_timer()
        previous = self.cycle
        super().on_headers_complete()
        if self.cycle is not previous:
            transport = _CycleTransport(self.transport, self._close_after_response)
            self.cycle.transport = cast(asyncio.Transport, transport)
            self._keeps_alive, self.cycle.keep_alive = self.cycle.keep_alive, False

    def on_body(self, body: bytes) -> None:
        self._num_body_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._is_reading_headers = True
        self._stop_body_timer()
        if self.cycle is not None and not self.cycle.response_started and not self._is_stopping:
            self.cycle.keep_alive = self._keeps_alive
        super().on_message_complete()

    def _start_timer(self) -> None:
        self._header_timer = self.loop.call_later(HEADER_SECONDS, self._close)

    def _stop_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _start_body_timer(self) -> None:
        self._num_body_bytes = 0
        left = self._body_began_at + self.max_body_seconds - self.loop.time()
        self._body_timer = self.loop.call_later(min(BODY_SECONDS, left) if left > 0 else BODY_SECONDS, self._check_body)

    def _stop_body_timer(self) -> None:
        if self._body_timer is not None:
            self._body_timer.cancel()
            self._body_timer = None

    def _check_body(self) -> None:
        """Close the connection if its body is too slow. A body that the application does not read yet is not slow."""
        self._body_timer = None
        is_late = self.loop.time() >= self._body_began_at + self.max_body_seconds
        if self.flow.read_paused or (self._num_body_bytes >= MIN_BODY_BYTES and not is_late):
            self._start_body_timer()
        elif not self.transport.is_closing():
            if not self.cycle.response_started:
                self.transport.write(TOO_SLOW)
            self.transport.close()

    def _close(self) -> None:
        self._header_timer = None
        if self.cycle is None or self.cycle.response_complete:
            self.transport.close()
        else:  # a reply is never cut: the client has sent the beginning of its next request
            self._start_timer()

    def _close_after_response(self) -> None:
        """Close the connection. A client that still sends is given time to read its answer.

        Closing a socket with bytes that nobody has read would reset it, and the client would lose the answer.
        """
        if self._is_reading_headers or self.transport.is_closing() or not self.transport.can_write_eof():
            self.transport.close()
        elif self._linger_timer is None:
            self._stop_body_timer()
            self._linger(LINGER_SECONDS)

    def _linger(self, seconds: float) -> None:
        """Send no more, read and discard what comes, and close the connection after a time."""
        if self.transport.can_write_eof():  # TLS cannot close one direction
            self.transport.write_eof()
        self._linger_timer = self.loop.call_later(seconds, self.transport.close)
