"""What a chat request says beside its body, and whether its client is still there."""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Self

from starlette.requests import Request

EPISODE_PARAMETER = "episode_id"
Disconnected = Callable[[], Awaitable[None]]  # returns when the client has left


@dataclass(frozen=True)
class RequestOrigin:
    """The headers of a request, the episode that its path names, and its id, which its completion gets too."""

    request_id: str
    headers: Mapping[str, str] = field(default_factory=dict)
    episode_id: str | None = None

    @classmethod
    def of(cls, request: Request) -> Self:
        return cls(request.state.request_id, request.headers, request.path_params.get(EPISODE_PARAMETER))


def disconnect_of(request: Request) -> Disconnected:
    """Return what waits until the client of the request leaves. The body has been read."""
    return partial(_wait_for_disconnect, request)


async def _wait_for_disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
