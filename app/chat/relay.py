"""Relay: from the engine's reply to OpenAI's bytes, recording the turn on the way out."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import anyio
import orjson
from starlette.requests import Request

from app.chat.service import OpenTurn, record
from app.db import Database
from app.engine.client import Completion, EngineClient
from app.engine.errors import EngineRefused, EngineUnavailable
from app.errors import AttuneError
from app.models import TurnState

log = logging.getLogger("attune.chat")
HUNG_UP = "client_disconnect"
LISTEN_SECONDS = 0.5


async def whole(db: Database, client: EngineClient, turn: OpenTurn, request: Request) -> dict[str, Any]:
    """One reply at once. A client that hangs up ends the engine's work too; what was said is still recorded."""
    work = asyncio.create_task(client.complete(turn.call))
    hung_up = False
    try:
        while not (await asyncio.wait([work], timeout=LISTEN_SECONDS))[0]:
            if not hung_up and await request.is_disconnected():
                hung_up = True
                with suppress(EngineUnavailable):  # it is too busy to listen: its reply is waited for
                    await client.abort(turn.id)
        completion = work.result()
    except (EngineUnavailable, EngineRefused) as error:
        await record(db, turn, None, TurnState.FAILED, "error", str(error))
        error.headers |= turn.headers
        raise
    except asyncio.CancelledError:  # the server is stopping
        work.cancel()
        with anyio.CancelScope(shield=True):
            await record(db, turn, None, TurnState.ABORTED, "server_stopped")
        raise
    if hung_up:
        await record(db, turn, completion.capture, TurnState.ABORTED, HUNG_UP)
    else:
        await record(db, turn, completion.capture, TurnState.DONE)
    return body(turn, completion)


def body(turn: OpenTurn, completion: Completion) -> dict[str, Any]:
    return {
        "id": turn.id,
        "object": "chat.completion",
        "created": completion.created,
        "model": turn.label,
        "choices": [
            {
                "index": 0,
                "message": {"refusal": None, **completion.message},
                "logprobs": completion.logprobs,
                "finish_reason": completion.finish_reason,
            }
        ],
        "usage": completion.usage,
    }


async def events(db: Database, client: EngineClient, turn: OpenTurn) -> AsyncIterator[bytes]:
    """Server-sent events as they come. The first item is empty: it says that the engine has begun (or raises)."""
    created = int(time.time())
    stream = client.stream(turn.call)
    state = TurnState.FAILED
    reason: str | None = "error"
    trouble: AttuneError | None = None
    begun = False
    try:
        async with stream:
            yield b""
            begun = True
            async for chunk in stream:
                chunk |= {"id": turn.id, "model": turn.label, "created": created}
                yield event(chunk)
        state, reason = TurnState.DONE, None
    except (EngineUnavailable, EngineRefused) as error:
        trouble = error
    except (asyncio.CancelledError, GeneratorExit):
        state, reason = TurnState.ABORTED, HUNG_UP
        raise
    finally:
        with anyio.CancelScope(shield=True):  # a client that hung up cancels us here; the turn is recorded all the same
            await record(db, turn, stream.capture, state, reason, str(trouble) if trouble else None)
    if trouble is not None and not begun:
        trouble.headers |= turn.headers
        raise trouble
    if trouble is not None:
        log.warning("%s broke off: %s", turn.id, trouble)
        yield event(trouble.body())
    yield b"data: [DONE]\n\n"


def event(payload: dict[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(payload) + b"\n\n"
