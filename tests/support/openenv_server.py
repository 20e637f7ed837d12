"""A server with OpenEnv's wire: it plays a recording of the real package, or says what a function of the test decides.

`openenv_messages.json` has what the server of tests/alignment/environments/packages/openenv has said. To record again:
start it in its environment, and `python -m tests.support.openenv_server http://127.0.0.1:PORT`.
"""

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from http import HTTPStatus
from pathlib import Path
from typing import TypedDict

import httpx2
from websockets.asyncio.client import connect
from websockets.asyncio.server import Server, ServerConnection, serve
from websockets.exceptions import ConnectionClosed
from websockets.http11 import Request, Response

from alignment.environments.tools.base import JsonObject

FILE = Path(__file__).with_name("openenv_messages.json")
Handle = Callable[[ServerConnection], Awaitable[None]]


class Exchange(TypedDict):
    sent: JsonObject
    received: JsonObject


class Recording(TypedDict):
    """One session: what the server says about its messages, and what it answers to each."""

    schema: JsonObject
    exchanges: list[Exchange]


def recordings() -> dict[str, Recording]:
    """Return the sessions by the name of their environment."""
    recorded: dict[str, Recording] = json.loads(FILE.read_text())
    return recorded


@asynccontextmanager
async def serve_openenv(
    schema: JsonObject, handle: Handle, is_open: Callable[[Request], bool] = lambda request: True
) -> AsyncIterator[str]:
    """Serve `/schema` and `/ws`, and yield the URL. `handle` answers the messages of a connection.

    `is_open`: whether a request is no refused one (401).
    """

    def answer_http(connection: ServerConnection, request: Request) -> Response | None:
        if not is_open(request):
            return connection.respond(HTTPStatus.UNAUTHORIZED, "")
        if request.path == "/schema":
            return connection.respond(HTTPStatus.OK, json.dumps(schema))
        return None if request.path == "/ws" else connection.respond(HTTPStatus.NOT_FOUND, "")

    server: Server
    async with serve(handle, "127.0.0.1", 0, process_request=answer_http) as server:
        yield f"http://127.0.0.1:{next(iter(server.sockets)).getsockname()[1]}"


@asynccontextmanager
async def replay(recording: Recording) -> AsyncIterator[str]:
    """Serve one recorded session. Another message than the recorded one ends the connection."""

    async def answer(connection: ServerConnection) -> None:
        for exchange in recording["exchanges"]:
            if json.loads(await connection.recv()) != exchange["sent"]:
                return
            await connection.send(json.dumps(exchange["received"]))
        await connection.recv()  # close

    async with serve_openenv(recording["schema"], answer) as url:
        yield url


def answer_each(reply: Callable[[JsonObject], JsonObject | str | None]) -> Handle:
    """Return a handler that answers with what the function returns, until it returns None."""

    async def handle(connection: ServerConnection) -> None:
        try:
            while True:
                message = json.loads(await connection.recv())
                answer = None if message["type"] == "close" else reply(message)
                if answer is None:
                    return
                await connection.send(answer if isinstance(answer, str) else json.dumps(answer))
        except ConnectionClosed:
            return

    return handle


async def ask_server(url: str, sent: list[JsonObject]) -> Recording:
    """Return what a real server answers to the messages of one session."""
    async with httpx2.AsyncClient(trust_env=False) as client:
        schema: JsonObject = (await client.get(f"{url}/schema")).json()
    exchanges: list[Exchange] = []
    async with connect(f"ws{url.removeprefix('http')}/ws", proxy=None) as connection:
        for message in sent:
            await connection.send(json.dumps(message))
            exchanges.append({"sent": message, "received": json.loads(await connection.recv())})
    return {"schema": schema, "exchanges": exchanges}


async def main(url: str) -> None:
    """Record all sessions again."""
    recorded = {
        name: await ask_server(f"{url}/{name}", [exchange["sent"] for exchange in recording["exchanges"]])
        for name, recording in recordings().items()
    }
    FILE.write_text(json.dumps(recorded, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
