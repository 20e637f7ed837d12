"""A door in front of a service, to be shut, stalled or left hanging, while nobody touches the service itself."""

import asyncio
import socket
import struct
from contextlib import suppress

from tests.support.engine_fixture import free_port

HARD = struct.pack("ii", 1, 0)  # close with a reset


class Proxy:
    """`async with Proxy(behind) as door: door.port`."""

    def __init__(self, behind: int) -> None:
        self.behind = behind
        self.port = free_port()  # and ours to take again, after nobody was let in
        self._pairs: set[tuple[asyncio.StreamWriter, asyncio.StreamWriter]] = set()
        self._open = asyncio.Event()
        self._open.set()
        self._swallow = self._mute = False
        self._pipes: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    async def __aenter__(self) -> "Proxy":
        await self._listen()
        return self

    async def __aexit__(self, *error: object) -> None:
        self._open.set()
        await self.refuse()
        for pipe in self._pipes:
            pipe.cancel()

    async def refuse(self) -> None:
        """Everybody is thrown out, and nobody is let in."""
        if self._server is not None:
            self._server.close()
            self._server = None
        for pair in list(self._pairs):
            for end in pair:
                reset(end)
        self._pairs.clear()

    def stall(self) -> None:
        """Connections stay, and new ones are taken; not a byte passes in either direction."""
        self._open.clear()

    async def half_open(self) -> None:
        """The service has forgotten everybody, and nobody has been told. New callers are let in and not heard."""
        self._swallow = True
        for _, inner in list(self._pairs):
            reset(inner)

    def lose_answers(self) -> None:
        """What is asked still arrives, and is done; whoever asked is thrown out before the answer."""
        self._mute = True

    async def mend(self) -> None:
        """As it was. Who was left hanging by `half_open` still hangs."""
        self._swallow = self._mute = False
        self._open.set()
        if self._server is None:
            await self._listen()

    async def _listen(self) -> None:
        self._server = await asyncio.start_server(self._welcome, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def _welcome(self, reader: asyncio.StreamReader, outer: asyncio.StreamWriter) -> None:
        if self._swallow:
            while await reader.read(65536):
                pass
            return
        await self._open.wait()
        try:
            inner_reader, inner = await asyncio.open_connection("127.0.0.1", self.behind)
        except OSError:
            reset(outer)
            return
        pair = (outer, inner)
        self._pairs.add(pair)
        asking, answering = self._pipe(reader, inner), self._pipe(inner_reader, outer, answers=True)
        pipes = [asyncio.create_task(asking), asyncio.create_task(answering)]
        self._pipes |= set(pipes)
        await asyncio.wait(pipes)
        self._pipes -= set(pipes)
        self._pairs.discard(pair)

    async def _pipe(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, answers: bool = False) -> None:
        with suppress(OSError):
            while read := await reader.read(65536):
                await self._open.wait()
                if answers and self._mute:
                    reset(writer)
                    return
                writer.write(read)
                await writer.drain()
        if not self._swallow:
            with suppress(OSError):
                writer.close()


def reset(end: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        end.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, HARD)
    end.transport.abort()
