"""How long chats and feedback take, from a request's head to its reply's last byte."""

import time

from starlette.types import ASGIApp, Receive, Scope, Send

from app.core.telemetry import Telemetry

ROUTES = {
    "/v1/chat/completions": "chat",
    "/v1/responses": "responses",
    "/v1/feedback": "feedback",
    "/v1/feedback/batch": "feedback_batch",
}


class Timed:
    """Lies outermost. What is inside leaves the status at `state.status`; nothing there means that none was sent."""

    def __init__(self, app: ASGIApp, telemetry: Telemetry) -> None:
        self.app, self._telemetry = app, telemetry

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        route = ROUTES.get(scope["path"]) if scope["type"] == "http" and scope["method"] == "POST" else None
        if route is None:
            await self.app(scope, receive, send)
            return
        began = time.perf_counter()
        try:
            await self.app(scope, receive, send)
        finally:
            status = scope.get("state", {}).get("status")
            kind = "none" if status is None else f"{status // 100}xx"
            self._telemetry.answered(route, kind, time.perf_counter() - began)
