"""Keys for all routes, and the number of requests that are generated.

vLLM's own keys guard /v1, /v2 and /inference alone: without this middleware anyone could generate by /invocations,
pause the engine, or run methods of its workers.
"""

import json
import os
import secrets
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

Scope = Mapping[str, Any]
Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

GENERATING_PATHS = ("/v1/chat/completions", "/v1/completions")
API_PATHS = (*GENERATING_PATHS, "/v1/models", "/tokenize")  # with the key of chats; all others need the admin key
RUNNING_PATH = "/attune/running"


class Guard:
    """An ASGI middleware. Its keys come from the environment, since everybody who may list processes reads flags."""

    def __init__(self, app: App) -> None:
        self._app = app
        self._api_key = os.environ["ATTUNE_ENGINE__API_KEY"].encode()
        self._admin_key = os.environ["ATTUNE_ENGINE__ADMIN_KEY"].encode()
        self._running = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        elif scope["type"] != "http" or not self._is_allowed(scope):
            await self._refuse(scope, send)
        elif scope["path"] == RUNNING_PATH:
            await _respond(send, 200, {"running": self._running})
        elif scope["path"] in GENERATING_PATHS:
            self._running += 1
            try:
                await self._app(scope, receive, send)
            finally:
                self._running -= 1
        else:
            await self._app(scope, receive, send)

    def _is_allowed(self, scope: Scope) -> bool:
        keys = [self._admin_key] if scope["path"] not in API_PATHS else [self._api_key, self._admin_key]
        given = dict(scope["headers"]).get(b"authorization", b"").removeprefix(b"Bearer ")
        return any(secrets.compare_digest(given, key) for key in keys)

    async def _refuse(self, scope: Scope, send: Send) -> None:
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            error = {"message": "Unauthorized", "type": "authentication_error", "code": 401}
            await _respond(send, 401, {"error": error})


async def _respond(send: Send, status: int, body: object) -> None:
    headers = [(b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": json.dumps(body).encode()})
