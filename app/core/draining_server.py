"""The HTTP server of the API, which lets load balancers and clients leave before it stops."""

import signal
import socket
import time
from types import FrameType

import uvicorn
from starlette.types import Scope

STATE = "draining"  # the key in the state of a request's scope


class DrainSignal:
    """Whether the server is about to stop. Requests share it: their states are copies, made when they began."""

    is_set = False


def is_draining(scope: Scope) -> bool:
    """Return whether the server of this request is about to stop. It may become true while the request runs."""
    signal = scope.get("state", {}).get(STATE)
    return isinstance(signal, DrainSignal) and signal.is_set


class DrainingServer(uvicorn.Server):
    """A uvicorn server that still answers requests for `delay_seconds` after SIGTERM.

    Meanwhile `is_draining` holds for new requests. Then it stops as uvicorn does: it accepts no connection and waits
    for the running requests. SIGINT, and a second SIGTERM, skip the delay.
    """

    def __init__(self, config: uvicorn.Config, delay_seconds: float) -> None:
        super().__init__(config)
        self._delay_seconds = delay_seconds
        self._stop_at: float | None = None
        self._signal = DrainSignal()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self.lifespan.state[STATE] = self._signal
        await super().startup(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._signal.is_set = True
        if sig == signal.SIGTERM and self.started and self._stop_at is None:
            self._captured_signals.append(sig)
            self._stop_at = time.monotonic() + self._delay_seconds
        else:
            super().handle_exit(sig, frame)

    async def on_tick(self, counter: int) -> bool:
        if self._stop_at is not None and time.monotonic() >= self._stop_at:
            self.should_exit = True
        return await super().on_tick(counter)
