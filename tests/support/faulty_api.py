"""The API behind a proxy that injects faults: responses of its own, and the loss of the API's responses."""

from dataclasses import dataclass, field
from typing import Any, Literal

from starlette.responses import Response

Fault = Response | Literal["lose_response"]


@dataclass
class FaultyApi:
    """The API. Each request takes the first of `faults`: a response instead of the API's, or the loss of its own."""

    app: Any
    faults: list[Fault] = field(default_factory=list)
    bodies: list[bytes] = field(default_factory=list)  # of every request, those that a fault took too

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        events: list[Any] = []
        while not events or events[-1].get("more_body"):
            events.append(await receive())
        self.bodies.append(b"".join(event.get("body", b"") for event in events))

        async def receive_again() -> Any:
            return events.pop(0) if events else await receive()

        fault = self.faults.pop(0) if self.faults else None
        if isinstance(fault, Response):
            await fault(scope, receive_again, send)
        elif fault is None:
            await self.app(scope, receive_again, send)
        else:
            await self.app(scope, receive_again, _discard)
            await send({"type": "http.response.start", "status": 201, "headers": [(b"content-length", b"1000")]})
            await send({"type": "http.response.body", "body": b"{", "more_body": True})
            raise ConnectionError("the connection breaks")


async def _discard(message: Any) -> None:
    pass


def error_response(status: int, **headers: str) -> Response:
    return Response(b"upstream is away", status, {name.replace("_", "-"): value for name, value in headers.items()})
