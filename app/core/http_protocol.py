"""Limits of a connection before a request's headers are complete: their size, and the time that they may take.

With httptools uvicorn limits neither. Its keep-alive time-out stops as soon as the client sends a byte.
"""

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEADER_BYTES = 64 * 1024
HEADER_SECONDS = 20.0
TOO_LARGE = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\ncontent-type: text/plain\r\n"
    b"content-length: 43\r\n\r\nThe headers of a request may have 64 KiB.\r\n"
)


class LimitedHttpProtocol(HttpToolsProtocol):
    """uvicorn's protocol, which closes a connection whose headers are too large or incomplete for too long."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._num_header_bytes = 0
        self._is_reading_headers = True
        self._header_timer: asyncio.TimerHandle | None = None
        self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
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
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._is_reading_headers = True
        super().on_message_complete()

    def _start_timer(self) -> None:
        self._header_timer = self.loop.call_later(HEADER_SECONDS, self._close)

    def _stop_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _close(self) -> None:
        self._header_timer = None
        if self.cycle is None or self.cycle.response_complete:
            self.transport.close()
        else:  # a reply is never cut: the client has sent the beginning of its next request
            self._start_timer()
