"""Wire: one kept connection with just enough HTTP/1.1, so that a load generator costs less than what it loads."""

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
WORDS = b'"content":"'
LARGEST = 2**24


@dataclass(frozen=True, slots=True)
class HttpResponse:
    """`first_at`: when the first words of a stream came (or the first byte of the body), on `time.perf_counter`."""

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
    """A request as bytes, made once and sent often."""
    content = orjson.dumps(body)
    named = {"host": urlsplit(url).netloc, "content-type": "application/json", **(headers or {})}
    head = "".join(f"{name}: {value}\r\n" for name, value in named.items())
    return f"POST {path} HTTP/1.1\r\n{head}content-length: {len(content)}\r\n\r\n".encode() + content


class Wire:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    @classmethod
    async def to(cls, url: str) -> "Wire":
        address = urlsplit(url)
        return cls(*await asyncio.open_connection(address.hostname, address.port, limit=LARGEST))

    def send(self, request: bytes) -> None:
        self._writer.write(request)

    async def ask(self, request: bytes) -> HttpResponse:
        self.send(request)
        head = await self._reader.readuntil(b"\r\n\r\n")
        status = int(head[9:12])
        small = head.lower()
        if b"transfer-encoding: chunked" in small:
            body, first_at = await self._chunks()
        else:
            _, _, rest = small.partition(b"content-length: ")
            body = await self._reader.readexactly(int(rest[: rest.index(b"\r")]))
            first_at = time.perf_counter()
        return HttpResponse(status, head, body, first_at, time.perf_counter())

    async def _chunks(self) -> tuple[bytes, float]:
        body, first_at = bytearray(), 0.0
        while size := int(await self._reader.readuntil(b"\r\n"), 16):
            piece = (await self._reader.readexactly(size + 2))[:-2]
            body += piece
            if not first_at and WORDS in piece.replace(EMPTY, b""):
                first_at = time.perf_counter()
        await self._reader.readexactly(2)
        return bytes(body), first_at or time.perf_counter()

    def close(self, *, hard: bool = False) -> None:
        """`hard`: the connection is reset, as by a process that dies; else it is closed, as by one that leaves."""
        if hard:
            self._writer.transport.abort()
        else:
            self._writer.close()


class Wires:
    """As many connections as are needed at once, each used again; a broken one is not."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._idle: deque[Wire] = deque()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for wire in self._idle:
            wire.close()

    async def open(self, count: int) -> None:
        self._idle.extend([await Wire.to(self.url) for _ in range(count)])

    @asynccontextmanager
    async def one(self) -> AsyncIterator[Wire]:
        wire = self._idle.popleft() if self._idle else await Wire.to(self.url)
        try:
            yield wire
        except BaseException:
            wire.close(hard=True)
            raise
        self._idle.append(wire)

    async def ask(self, request: bytes) -> HttpResponse:
        async with self.one() as wire:
            return await wire.ask(request)
