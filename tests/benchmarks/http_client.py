"""A minimal HTTP/1.1 client on persistent connections, so that the load generator uses little CPU time."""

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit

import orjson

EMPTY = b'"content":""'
TEXT = b'"content":"'
MAX_LINE_BYTES = 2**24


@dataclass(frozen=True, slots=True)
class HttpResponse:
    """`first_at`: the time of the first text of a stream, or of a whole body, on `time.perf_counter`."""

    status: int
    head: bytes
    body: bytes
    first_at: float
    last_at: float

    def header(self, name: str) -> str | None:
        for line in self.head.split(b"\r\n"):
            key, _, value = line.partition(b": ")
            if key.lower() == name.encode():
                return value.decode()
        return None


def post(url: str, path: str, body: Any, headers: Mapping[str, str] | None = None) -> bytes:
    """Return a POST request as bytes, which can be sent many times."""
    content = orjson.dumps(body)
    all_headers = {"host": urlsplit(url).netloc, "content-type": "application/json", **(headers or {})}
    head = "".join(f"{name}: {value}\r\n" for name, value in all_headers.items())
    return f"POST {path} HTTP/1.1\r\n{head}content-length: {len(content)}\r\n\r\n".encode() + content


class HttpConnection:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    @classmethod
    async def connect(cls, url: str) -> "HttpConnection":
        address = urlsplit(url)
        return cls(*await asyncio.open_connection(address.hostname, address.port, limit=MAX_LINE_BYTES))

    def send(self, request: bytes) -> None:
        self._writer.write(request)

    async def request(self, message: bytes) -> HttpResponse:
        self.send(message)
        head = await self._reader.readuntil(b"\r\n\r\n")
        status = int(head[9:12])
        lower = head.lower()
        if b"transfer-encoding: chunked" in lower:
            body, first_at = await self._read_chunks()
        else:
            _, _, rest = lower.partition(b"content-length: ")
            body = await self._reader.readexactly(int(rest[: rest.index(b"\r")]))
            first_at = time.perf_counter()
        return HttpResponse(status, head, body, first_at, time.perf_counter())

    async def _read_chunks(self) -> tuple[bytes, float]:
        body, first_at = bytearray(), 0.0
        while size := int(await self._reader.readuntil(b"\r\n"), 16):
            chunk = (await self._reader.readexactly(size + 2))[:-2]
            body += chunk
            if not first_at and TEXT in chunk.replace(EMPTY, b""):
                first_at = time.perf_counter()
        await self._reader.readexactly(2)
        return bytes(body), first_at or time.perf_counter()

    def close(self, *, hard: bool = False) -> None:
        """Close the connection. With `hard` it is reset, as when the client process dies."""
        if hard:
            self._writer.transport.abort()
        else:
            self._writer.close()


class ConnectionPool:
    """A pool that opens connections as needed and reuses them, except those that failed."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._idle: deque[HttpConnection] = deque()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for connection in self._idle:
            connection.close()

    async def open(self, count: int) -> None:
        self._idle.extend([await HttpConnection.connect(self.url) for _ in range(count)])

    @asynccontextmanager
    async def connection(self) -> AsyncIterator[HttpConnection]:
        connection = self._idle.popleft() if self._idle else await HttpConnection.connect(self.url)
        try:
            yield connection
        except BaseException:
            connection.close(hard=True)
            raise
        self._idle.append(connection)

    async def request(self, message: bytes) -> HttpResponse:
        async with self.connection() as connection:
            return await connection.request(message)
