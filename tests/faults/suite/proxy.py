"""A TCP proxy in front of a service, which can refuse, stall or reset connections while the service keeps running."""

import asyncio
import socket
import struct
from contextlib import suppress

from tests.support.engine_fixture import free_port

LINGER_ZERO = struct.pack("ii", 1, 0)  # a close sends a reset


class Proxy:
    """A context manager: `async with Proxy(service_port) as proxy: proxy.port`."""

    def __init__(self, service_port: int) -> None:
        self.service_port = service_port
        self.port = free_port()
        self._pairs: set[tuple[asyncio.StreamWriter, asyncio.StreamWriter]] = set()
        self._open = asyncio.Event()
        self._open.set()
        self._ignores_input = self._drops_answers = False
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
        """Reset all connections, and refuse new ones."""
        if self._server is not None:
            self._server.close()
            self._server = None
        for pair in list(self._pairs):
            for writer in pair:
                reset(writer)
        self._pairs.clear()

    def stall(self) -> None:
        """Keep connections and accept new ones, but pass no byte in either direction."""
        self._open.clear()

    async def half_open(self) -> None:
        """Close the connections to the service but not those to clients; accept new ones and ignore their input."""
        self._ignores_input = True
        for _, inner in list(self._pairs):
            reset(inner)

    def drop_answers(self) -> None:
        """Pass requests on, and reset the client's connection instead of passing the answer."""
        self._drops_answers = True

    async def restore(self) -> None:
        """End the fault. Connections that `half_open` closed stay closed."""
        self._ignores_input = self._drops_answers = False
        self._open.set()
        if self._server is None:
            await self._listen()

    async def _listen(self) -> None:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def _accept(self, reader: asyncio.StreamReader, outer: asyncio.StreamWriter) -> None:
        if self._ignores_input:
            while await reader.read(65536):
                pass
            return
        await self._open.wait()
        try:
            inner_reader, inner = await asyncio.open_connection("127.0.0.1", self.service_port)
        except OSError:
            reset(outer)
            return
        pair = (outer, inner)
        self._pairs.add(pair)
        requests, answers = self._pipe(reader, inner), self._pipe(inner_reader, outer, is_answers=True)
        pipes = [asyncio.create_task(requests), asyncio.create_task(answers)]
        self._pipes |= set(pipes)
        await asyncio.wait(pipes)
        self._pipes -= set(pipes)
        self._pairs.discard(pair)

    async def _pipe(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, is_answers: bool = False
    ) -> None:
        with suppress(OSError):
            while content := await reader.read(65536):
                await self._open.wait()
                if is_answers and self._drops_answers:
                    reset(writer)
                    return
                writer.write(content)
                await writer.drain()
        if not self._ignores_input:
            with suppress(OSError):
                writer.close()


def reset(writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, LINGER_ZERO)
    writer.transport.abort()
