"""A session of an OpenEnv server: JSON messages over a WebSocket, with one environment behind it (OpenEnv 0.2 and 0.3).

Needs the package `websockets`. A message has a `type` and `data`; each is answered by one:

| sent | answered by |
|---|---|
| `reset`: parameters of the environment's reset | `observation`: `observation`, `reward`, `done` |
| `step`: an action | the same |
| `state` | `state`: the environment's state |
| `mcp`: a request of JSON-RPC, `tools/list` or `tools/call` | `mcp`: its response |
| `close` | the end of the connection |

Anything may be answered by an `error`: its `code` says whose fault it is.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING

import orjson
from pydantic import BaseModel, ConfigDict, FiniteFloat, JsonValue, ValidationError

from alignment.environments.errors import InfrastructureFailure
from alignment.environments.http_client import CONNECT_SECONDS, MAX_BODY_BYTES, default_ssl_context, require_key
from alignment.environments.tools.base import JsonObject
from alignment.environments.typed_answers import read_answer
from alignment.errors import UnavailableEnvironment

if TYPE_CHECKING:
    from websockets.asyncio.client import ClientConnection

log = logging.getLogger(__name__)

NOUN = "the OpenEnv server"
INSTALL = "openenv: needs the package websockets: pip install websockets"
REFUSED_ACTION = "VALIDATION_ERROR"
NO_PLACE = "CAPACITY_REACHED"
UNKNOWN_TYPE = "UNKNOWN_TYPE"
CLOSE_SECONDS = 5.0  # until the server has closed its environment
FIRST_WAIT_SECONDS = 0.1
LONGEST_WAIT_SECONDS = 2.0
MAX_MESSAGE_CHARS = 300


class RefusedAction(Exception):
    """The server does not accept an action: it does not fit the environment's schema."""


class Observed(BaseModel):
    """What a reset or a step has led to. `reward` is None where the environment says none."""

    observation: JsonObject = {}
    reward: FiniteFloat | None = None
    done: bool = False


class JsonRpcError(BaseModel):
    model_config = ConfigDict(extra="ignore")

    message: str = ""


class JsonRpcResponse(BaseModel):
    model_config = ConfigDict(extra="ignore")

    result: JsonValue = None
    error: JsonRpcError | None = None


class FieldError(BaseModel):
    model_config = ConfigDict(extra="ignore")

    loc: list[str | int] = []
    msg: str = ""


class ServerError(BaseModel):
    model_config = ConfigDict(extra="ignore")

    message: str = ""
    code: str = ""
    errors: list[FieldError] = []


class Answer(BaseModel):
    type: str
    data: JsonObject = {}


class _ServerFailure(Exception):
    """The server has answered with an error."""

    def __init__(self, error: ServerError) -> None:
        super().__init__(error.message)
        self.error = error


class OpenEnvSession:
    """A session. Every method but `close` raises InfrastructureFailure if the server fails or does not answer."""

    def __init__(self, connection: ClientConnection, seconds: float) -> None:
        self._connection = connection
        self._seconds = seconds

    async def step(self, action: JsonObject) -> Observed:
        """Return what the action has led to. Raises RefusedAction."""
        try:
            answer = await self._ask("step", action)
        except _ServerFailure as failure:
            if failure.error.code == REFUSED_ACTION:
                raise RefusedAction(_describe_fields(failure.error)) from failure
            raise _to_infrastructure(failure.error) from failure
        return read_answer(Observed, answer, NOUN)

    async def state(self) -> JsonObject:
        """Return the environment's state."""
        try:
            return await self._ask("state")
        except _ServerFailure as failure:
            raise _to_infrastructure(failure.error) from failure

    async def call_mcp(self, method: str, params: JsonObject) -> JsonRpcResponse:
        """Return the response of JSON-RPC: an error, too, where the server knows nothing of MCP."""
        try:
            answer = await self._ask("mcp", {"jsonrpc": "2.0", "id": 1, "method": method, "params": params})
        except _ServerFailure as failure:
            if failure.error.code == UNKNOWN_TYPE:
                return JsonRpcResponse(error=JsonRpcError(message=failure.error.message))
            raise _to_infrastructure(failure.error) from failure
        return read_answer(JsonRpcResponse, answer, NOUN)

    async def close(self) -> None:
        """End the session. Its place is free when the server has ended the connection."""
        from websockets.exceptions import ConnectionClosed

        with suppress(ConnectionClosed, TimeoutError):
            async with asyncio.timeout(CLOSE_SECONDS):
                await self._connection.send('{"type": "close"}')
                while True:
                    await self._connection.recv()
        await self._connection.close()

    async def _reset(self, parameters: JsonObject, seconds: float) -> Observed:
        return read_answer(Observed, await self._ask("reset", parameters, seconds), NOUN)

    async def _ask(self, kind: str, data: JsonObject | None = None, seconds: float | None = None) -> JsonObject:
        """Return the data of the answer. Raises _ServerFailure."""
        from websockets.exceptions import ConnectionClosed

        limit = self._seconds if seconds is None else seconds
        message: JsonObject = {"type": kind} if data is None else {"type": kind, "data": data}
        try:
            async with asyncio.timeout(limit):
                with suppress(ConnectionClosed):  # what the server has said before is still to be read
                    await self._connection.send(orjson.dumps(message).decode())
                received = await self._connection.recv()
        except TimeoutError as error:
            raise InfrastructureFailure(f"{NOUN} does not answer {kind} within {limit:g} s") from error
        except ConnectionClosed as error:
            raise InfrastructureFailure(f"{NOUN} has ended the session: {error}") from error
        try:
            answer = Answer.model_validate_json(received)
        except ValidationError as error:
            raise InfrastructureFailure(f"{NOUN} has answered {kind} with what is no message") from error
        if answer.type == "error":
            raise _ServerFailure(read_answer(ServerError, answer.data, NOUN))
        return answer.data


async def begin_session(
    url: str, parameters: JsonObject, *, headers: Mapping[str, str], start_seconds: float, seconds: float
) -> tuple[OpenEnvSession, Observed]:
    """Return a new session and the observation of its reset. It waits for a place on a server that has none free.

    `url`: of the WebSocket. `headers` may hold a key. `start_seconds`: for the whole; `seconds`: for each later answer.
    """
    loop = asyncio.get_running_loop()
    gives_up_at = loop.time() + start_seconds
    wait = FIRST_WAIT_SECONDS
    while True:
        session = OpenEnvSession(await _connect(url, headers), seconds)
        try:
            return session, await session._reset(parameters, max(0.0, gives_up_at - loop.time()))
        except _ServerFailure as failure:
            await session.close()
            if failure.error.code != NO_PLACE or loop.time() + wait > gives_up_at:
                raise _to_infrastructure(failure.error) from failure
        except BaseException:
            await session.close()
            raise
        await asyncio.sleep(wait)
        wait = min(2 * wait, LONGEST_WAIT_SECONDS)


async def _connect(url: str, headers: Mapping[str, str]) -> ClientConnection:
    try:
        from websockets.asyncio.client import connect
        from websockets.exceptions import InvalidStatus, WebSocketException
    except ImportError as error:
        raise UnavailableEnvironment(INSTALL) from error
    try:
        return await connect(
            url,
            additional_headers=headers,
            ssl=default_ssl_context() if url.startswith("wss:") else None,
            proxy=None,
            compression=None,
            max_size=MAX_BODY_BYTES,
            open_timeout=CONNECT_SECONDS,
            close_timeout=CLOSE_SECONDS,
            ping_interval=None,  # each answer has a time limit, and an environment may block its server
        )
    except InvalidStatus as error:
        status = error.response.status_code
        require_key(status, NOUN)
        raise InfrastructureFailure(f"{NOUN} has answered with {status}") from error
    except (OSError, TimeoutError, WebSocketException) as error:
        raise InfrastructureFailure(f"{NOUN} does not answer ({type(error).__name__})") from error


def _describe_fields(error: ServerError) -> str:
    """Example: "row: Field required; column: Input should be a valid integer" """
    fields = [f"{'.'.join(map(str, each.loc))}: {each.msg}" if each.loc else each.msg for each in error.errors]
    return ("; ".join(fields) or error.message)[:MAX_MESSAGE_CHARS]


def _to_infrastructure(error: ServerError) -> InfrastructureFailure:
    message = error.message.strip().partition("\n")[0][:MAX_MESSAGE_CHARS]
    return InfrastructureFailure(f"{NOUN} has failed ({error.code}): {message}")
